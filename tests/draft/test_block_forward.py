"""Block heads on every backend that runs them, against their restatement number by number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from paceline import kernels
from paceline.backend.cuda import load as cuda
from paceline.backend.native import decoder as native_decoder
from paceline.backend.native import load as native
from paceline.backend.reference.block_head import load_runner
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.seam import CorrectRequest, Features, FedBack, Packed, PassRequest, StepLimit
from paceline.core.nouns import UNCHOSEN, SamplingSpec, Stop, Taps
from paceline.core.params import SamplingParams
from paceline.model.heads.checkpoint import load_head, narrowed
from tests.backend.backends import load_on_host
from tests.draft.test_block_files import FORMATS, block_tensors
from tests.draft.test_head_files import TARGET, write
from tests.model.helpers import pack
from tests.oracles.block_head import Drafted, draft_block
from tests.tiny import tiny_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.backend.native.head import NativeHead
    from paceline.backend.seam import HeadRunner, PassResult
    from paceline.model.heads.checkpoint import Head

PAGES = [[3, 1], [0], [2, 5, 4]]
LENGTHS = (17, 1, 34)  # known tokens of each row, the newest included: the second has no context
CHUNK = 7  # tokens of context that are stored at once
WIDTH = TARGET.hidden_size
TEXTS = [np.random.default_rng(i).integers(0, TARGET.vocab_size, n) for i, n in enumerate(LENGTHS)]
THREADS = kernels.ThreadPool(2)
LOGITS = SamplingSpec("logits", SamplingParams())


def scaled(values: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a head whose states stay near 1."""
    return {
        name: t / np.sqrt(t.shape[-1], dtype=np.float32) if t.ndim == 2 and t.dtype == np.float32 else t
        for name, t in block_tensors(values).items()
    }


def taps_of(row: int, layers: Sequence[int]) -> dict[int, Any]:
    """The states that a target would have had, in half precision as they are kept."""
    count = LENGTHS[row] - 1
    found = np.random.default_rng(50 + row).standard_normal((TARGET.num_layers + 1, count, WIDTH))
    return {layer: found[layer].astype(np.float16) for layer in layers}


def expected(values: dict[str, Any], tensors: dict[str, Any], weights: dict[str, Any]) -> list[Drafted]:
    """What the restatement guesses for each row."""
    embed = np.asarray(weights["embed"], np.float64)
    head = np.asarray(weights.get("head", weights["embed"]), np.float64)
    every = range(TARGET.num_layers + 1)
    return [draft_block(values, tensors, embed, head, TEXTS[i].tolist(), taps_of(i, every)) for i in range(3)]


def store_context(runner: HeadRunner, kv: Any) -> None:
    """Write the context of every row, some tokens at a time."""
    layers = runner.config.taps
    store = runner.new_tap_store(6)
    for start in range(0, max(LENGTHS), CHUNK):
        rows = [i for i, length in enumerate(LENGTHS) if start < length - 1]
        if not rows:
            return
        ends = [min(start + CHUNK, LENGTHS[i] - 1) for i in rows]
        packed = pack([(TEXTS[i][start:end], start, PAGES[i]) for i, end in zip(rows, ends, strict=True)])
        states = {
            layer: np.concatenate(
                [taps_of(i, layers)[layer][start:end] for i, end in zip(rows, ends, strict=True)]
            ).astype(np.float32)
            for layer in layers
        }
        counts = [end - start for end in ends]
        store.write(Taps(states, packed.cu_len, packed.slots, [start] * len(rows)), counts)
        pieces = [(index, start, count) for index, count in enumerate(counts)]
        packed.wanted = np.empty(0, np.int64)
        runner.launch(PassRequest(packed, kv, (), features=Features(store, pieces))).wait()


def blocks(runner: HeadRunner, depth: int) -> Packed:
    """A block of each row, all of whose guesses are wanted."""
    block = runner.config.block
    assert block is not None
    assert runner.config.mask_token_id is not None
    masks = [runner.config.mask_token_id] * (block.size - 1)
    spans = [(np.array([TEXTS[i][-1], *masks]), LENGTHS[i] - 1, [*PAGES[i], 6 + i]) for i in range(len(LENGTHS))]
    packed = pack(spans)
    packed.wanted = np.concatenate([np.arange(depth) + start + block.first for start in packed.cu_len[:-1]])
    return packed


def guess_all(runner: HeadRunner, kv: Any) -> tuple[np.ndarray, list[list[PassResult]]]:
    """Guesses [rows, drafts] of every row, and the results of each."""
    block = runner.config.block
    assert block is not None
    depth, rows = block.num_drafts, range(len(LENGTHS))
    hidden = runner.launch(PassRequest(blocks(runner, depth), kv, ())).wait().hidden
    before = [int(text[-1]) for text in TEXTS]
    told: object = np.zeros((len(rows), block.state_size), np.float32)
    first = [depth * row for row in rows]
    found, results = [], []
    for number in range(depth):
        places, state = [place + number for place in first], FedBack(told, rows)
        result = runner.correct(CorrectRequest(hidden, places, [LOGITS] * len(rows), before, state))
        assert result.logits is not None
        before, told = result.logits.argmax(-1).tolist(), result.hidden
        found.append(before)
        results.append(result)
    return np.array(found).T, results


def check(runner: HeadRunner, ids: Any, wanted: list[Drafted], tolerance: float) -> None:
    """Compare guesses, logits and log-odds with the restatement's. ids: of the head's tokens, as in its file."""
    kv = runner.new_kv(9)
    store_context(runner, kv)
    token_ids, results = guess_all(runner, kv)
    for row, drafted in enumerate(wanted):
        logits = np.array([result.logits[row] for result in results])  # type: ignore[index]
        assert np.isneginf(np.delete(logits, ids, -1)).all()
        assert np.abs(logits[:, ids] - drafted.logits).max() < tolerance * np.abs(drafted.logits).max()
        assert token_ids[row].tolist() == drafted.token_ids
        if drafted.log_odds:
            odds = [result.margins[row] for result in results]  # type: ignore[index]
            np.testing.assert_allclose(odds, drafted.log_odds, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("name", FORMATS)
def test_the_reference_runs_the_format(name: str, tmp_path: Path) -> None:
    values = FORMATS[name]
    tensors, weights = scaled(values), tiny_weights(TARGET)
    head = load_head(write(tmp_path, values, tensors), TARGET)
    runner = load_runner(head, ReferenceDecoder(TARGET, weights, torch.float64), None, None)
    check(runner, head.token_ids, expected(values, tensors, weights), 1e-6)


def cuda_runner(head: Head) -> HeadRunner:
    return cuda.load_runner(head, load_on_host(TARGET, tiny_weights(TARGET), "f64", "f64", None), None, None)


def native_runner(head: Head, weight_type: str = "f32", own: str | None = None, kv: str = "f32") -> NativeHead:
    weights = tiny_weights(TARGET, dtype=torch.float32)
    return native.load_runner(head, native.pack_decoder(TARGET, weights, THREADS, weight_type, kv), None, own)


@pytest.mark.parametrize(("runner", "tolerance"), [(cuda_runner, 1e-6), (native_runner, 2e-4)])
@pytest.mark.parametrize("name", FORMATS)
def test_device_and_native_kernels_run_the_format(
    name: str, runner: Callable[[Head], HeadRunner], tolerance: float, tmp_path: Path
) -> None:
    values = FORMATS[name]
    tensors = scaled(values)
    head = load_head(write(tmp_path, values, tensors), TARGET)
    check(runner(head), head.token_ids, expected(values, tensors, tiny_weights(TARGET)), tolerance)


def few_bits(head: Head, own: str) -> HeadRunner:
    """A head of few bits on the backend that has them."""
    if own in ("fp8", "int4"):
        target = load_on_host(TARGET, tiny_weights(TARGET, dtype=torch.float32), "bf16", "bf16", None)
        return cuda.load_runner(head, target, None, own)
    return native_runner(head, "int8", own, "i16")


@pytest.mark.parametrize(("own", "limit"), [("int8", 0.05), ("int4_row", 0.4), ("fp8", 0.15), ("int4", 0.4)])
def test_drafters_of_few_bits_are_near(own: str, limit: float, tmp_path: Path) -> None:
    """Rounding changes logits by some percent of their spread."""
    values = FORMATS["speculators, rnn"]
    head = load_head(write(tmp_path, values, scaled(values)), TARGET)
    found = []
    for runner in (native_runner(head), few_bits(head, own)):
        kv = runner.new_kv(9)
        store_context(runner, kv)
        found.append(np.array([result.logits for result in guess_all(runner, kv)[1]])[:, :, head.token_ids])
    first = [logits[0] for logits in found]  # the others follow guesses that may differ
    assert 0 < np.abs(first[0] - first[1]).std() < limit * first[0].std()


class StepByStep:
    """The choices of `steps`, one guess after another."""

    def __init__(self, runner: HeadRunner, kv: Any) -> None:
        self.runner, self.kv = runner, kv

    def run(self, specs: Sequence[Sequence[SamplingSpec]]) -> tuple[list[list[int]], list[list[float]]]:
        """Guesses and margins of each row; specs: of each row, one for each guess."""
        block = self.runner.config.block
        assert block is not None
        depths = [len(of) for of in specs]
        hidden = self.runner.launch(PassRequest(blocks(self.runner, max(depths)), self.kv, ())).wait().hidden
        chosen: list[list[int]] = [[] for _ in specs]
        margins: list[list[float]] = [[] for _ in specs]
        for row, of in enumerate(specs):
            before, told = int(TEXTS[row][-1]), np.zeros((1, block.state_size), np.float32)
            for number, spec in enumerate(of):
                place = max(depths) * row + number
                request = CorrectRequest(hidden, [place], [spec], [before], FedBack(told, [0]))
                result = self.runner.correct(request)
                assert result.margins is not None
                before, told = int(result.token_ids[0]), result.hidden  # type: ignore[assignment]
                chosen[row].append(before)
                margins[row].append(float(result.margins[0]))
        return chosen, margins


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_chooses_what_its_steps_choose(name: str, tmp_path: Path) -> None:
    """Greedy and drawn; a row with a stop ends early, and one with hints follows them."""
    values = FORMATS[name]
    head = load_head(write(tmp_path, values, scaled(values)), TARGET)
    runner = native_runner(head)
    block, kv = head.config.block, runner.new_kv(9)
    assert block is not None
    store_context(runner, kv)
    drawn = SamplingParams(temperature=0.9)
    specs = [
        [SamplingSpec("argmax", SamplingParams(temperature=0.0), margin=True)] * block.num_drafts,
        [
            SamplingSpec("noisy", drawn, seed=5, position=1 + number, margin=True)
            for number in range(block.num_drafts)
        ],
        [SamplingSpec("argmax", SamplingParams(temperature=0.0), margin=True)] * block.num_drafts,
    ]
    expected_ids, expected_margins = StepByStep(runner, kv).run(specs)
    packed = blocks(runner, block.num_drafts)
    stop = Stop([0.0] * block.num_drafts, 0.0, [0.3] * block.num_drafts)  # halves at each: two guesses
    steps = [StepLimit(block.num_drafts, stop), StepLimit(block.num_drafts), StepLimit(block.num_drafts)]
    flat = [spec for of in specs for spec in of]
    result = runner.launch(PassRequest(packed, kv, flat, steps)).wait()
    token_ids = result.token_ids.reshape(3, -1).tolist()
    assert result.margins is not None
    assert token_ids[1:] == expected_ids[1:]
    np.testing.assert_allclose(result.margins.reshape(3, -1)[1:], expected_margins[1:], rtol=1e-5, atol=1e-5)
    assert token_ids[0] == [*expected_ids[0][:2], *[UNCHOSEN] * (block.num_drafts - 2)]


def test_the_border_refuses_what_does_not_fit(tmp_path: Path) -> None:
    """Features that are missing, tokens out of range, blocks of a decoder that has none."""
    values = FORMATS["speculators, rnn"]
    head = load_head(write(tmp_path, values, scaled(values)), TARGET)
    runner = native_runner(head)
    kv, packed = runner.new_kv(9), blocks(runner, 5)
    bare = native_decoder.read_inputs(runner.compiled, packed, None)
    with pytest.raises(ValueError, match="features"):
        runner.compiled.store_context(kv, bare)
    with pytest.raises(ValueError, match="no context"):
        runner.target.compiled.store_context(kv, bare)
    with pytest.raises(ValueError, match="side by side"):
        steps = [StepLimit(5), StepLimit(5), StepLimit(5)]
        packed.wanted = packed.wanted[::-1].copy()
        greedy = SamplingSpec("argmax", SamplingParams(temperature=0.0))
        runner.launch(PassRequest(packed, kv, [greedy] * 15, steps)).wait()
    state = np.zeros((1, 10), np.float32)
    for token, width, reason in ((TARGET.vocab_size, 10, "vocabulary"), (0, 9, "corrector")):
        states, told = np.zeros((1, WIDTH), np.float32), FedBack(state[:, :width], [0])
        with pytest.raises(ValueError, match=reason):
            runner.correct(CorrectRequest(states, [0], [LOGITS], [token], told))


@pytest.mark.parametrize(
    ("which", "given", "reason"),
    [
        (0, np.zeros((2, WIDTH - 1), np.float32), "states"),
        (0, np.zeros((0, WIDTH), np.float32), "states"),
        (0, np.zeros((1, WIDTH), np.float32), "before it"),
        (1, np.arange(1), "before it"),
        (1, np.array([0, TARGET.vocab_size]), "vocabulary"),
        (1, np.array([0, -1]), "vocabulary"),
        (2, np.zeros((1, 10), np.float32), "corrector"),
        (None, None, "fewer"),
    ],
)
def test_the_border_refuses_guesses_that_do_not_fit(
    which: int | None, given: Any, reason: str, tmp_path: Path
) -> None:
    values = FORMATS["speculators, rnn"]
    runner = native_runner(load_head(write(tmp_path, values, scaled(values)), TARGET))
    arrays: list[Any] = [np.zeros((2, WIDTH), np.float32), np.arange(2), np.zeros((2, 10), np.float32)]
    arrays = [given if i == which else array for i, array in enumerate(arrays)]
    others: Any = {
        "specs": kernels.read_specs([SamplingSpec("argmax", SamplingParams())] * 2, TARGET.vocab_size),
        "vocab": 1000 if which is None else 20,
        "chosen": np.empty(2, np.int64),
        "logits": np.empty((0, 20), np.float32),
        "margins": np.empty(2, np.float32),
        "state": np.empty((2, 10), np.float32),
    }
    for compiled, why in ((runner.compiled, reason), (runner.target.compiled, "no blocks")):
        with pytest.raises(ValueError, match=why):
            compiled.correct(*arrays, **others)


def test_a_head_without_an_output_of_its_own_may_write_some_tokens_only(tmp_path: Path) -> None:
    """The lowest, with rows of the target's matrix and of the corrector; those of requests uncorrected.

    The requests' tokens change between passes.
    """
    values = FORMATS["authors, corrected"]
    tensors, weights = scaled(values), tiny_weights(TARGET)
    whole = load_head(write(tmp_path, values, tensors), TARGET)
    wanted = expected(values, tensors, weights)
    head = narrowed(whole, 100)
    reference = load_runner(head, ReferenceDecoder(TARGET, weights, torch.float64), None, None)
    for runner, tolerance in ((reference, 1e-6), (cuda_runner(head), 1e-6), (native_runner(head), 2e-4)):
        kv = runner.new_kv(9)
        store_context(runner, kv)
        for own in ([300, 150], [250], [300, 150]):
            runner.set_request_tokens(np.array(own))
            first = guess_all(runner, kv)[1][0].logits
            assert first is not None
            for row, drafted in enumerate(wanted):
                limit = tolerance * np.abs(drafted.logits).max()
                assert np.abs(first[row, :100] - drafted.logits[0, :100]).max() < limit
                assert np.isfinite(first[row]).sum() == 100 + len(own)
                state = weights["embed"].double().numpy()[own] @ drafted.states[0]
                assert np.abs(first[row, own] - state).max() < limit
