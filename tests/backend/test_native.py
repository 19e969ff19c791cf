"""The native kernels against their twins: the reference decoder, and themselves in every other batch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch

from paceline import kernels
from paceline.backend.native.decoder import NativeDecoder
from paceline.backend.native.load import pack_decoder
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.seam import PassRequest
from paceline.core.nouns import BROKEN, Edits, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_ahead, choose_token
from paceline.model.config import ModelConfig, Rope, Sliding
from paceline.model.experts import Experts
from paceline.model.families import FAMILIES
from paceline.model.files.gguf_file import GgufTensor
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backend.seam import KV, Packed, PassResult, Pending


def sliding(window: int) -> Sliding:
    """A middle layer that sees all tokens, between two that see so many."""
    return Sliding(window, frozenset({0, 2}), Rope(theta=900.0, scaling="linear", factor=2.0))


KV_TYPES = ["f32", "f16", "i16", "i8"]
WEIGHTS = ["f32", "bf16", "int8", "int4", "int4_row"]
FAMILY_CASES = {
    "llama": tiny_config("llama"),
    "untied": tiny_config("llama", tie_embeddings=False),
    "mistral": tiny_config("mistral", head_dim=16, num_kv_heads=1),
    "qwen2": tiny_config("qwen2", hidden_size=40, intermediate_size=72),
    "qwen3": tiny_config("qwen3", head_dim=24),
    "gemma3": tiny_config("gemma3_text", num_layers=3, head_dim=24, query_scalar=12.0, sliding=sliding(40)),
    "far window": tiny_config("gemma3_text", num_layers=3, sliding=sliding(263)),
    "qwen3 moe": tiny_config("qwen3_moe", hidden_size=40),
    "gpt-oss": tiny_config("gpt_oss", num_layers=3, sliding=sliding(40)),
    "qwen2 moe": tiny_config("qwen2_moe", num_layers=3, intermediate_size=72),
    "gemma4": tiny_config("gemma4_text", num_layers=3),
    "mixtral": tiny_config("mixtral", experts=Experts(70, 5)),
    "wide": tiny_config("llama", hidden_size=128, intermediate_size=200, head_dim=64, num_heads=6, num_kv_heads=2),
}
# Of a lesser instruction set some cases tell enough: together they have every kernel. gemma2 has that of caps.
LESSER = "PACELINE_ISA" in os.environ
MORE_FAMILIES = ["gemma2"] if LESSER else [*FAMILIES]
BATCH_CASES = ["llama", "gemma3", "gpt-oss", "gemma4"]
BATCH_CASES += ["qwen2", "wide", "far window", "qwen2 moe"] * (not LESSER)
MORE_BATCH_CASES = ["gemma2"] + ["ministral3", "smollm3", "phi3", "granite", "olmo2"] * (not LESSER)
FAMILY_CASES |= {
    name: tiny_config(name) for name in MORE_FAMILIES if name not in FAMILY_CASES and name != "gemma3_text"
}
LENGTH = 300  # longer than a span of attention
IDS = np.random.default_rng(7).integers(0, 320, LENGTH).tolist()
SHUFFLED = [(5 * i + 3) % 19 for i in range(19)]
GREEDY = SamplingSpec("logits", SamplingParams(temperature=0.0))


def native(config: ModelConfig, types: str, threads: int = 1, kv: str = "f32") -> NativeDecoder:
    return pack_decoder(config, tiny_weights(config, dtype=torch.float32), kernels.ThreadPool(threads), types, kv)


def logits_of(
    decoder: NativeDecoder | ReferenceDecoder, chunk: int = LENGTH, pages: list[int] = SHUFFLED
) -> np.ndarray:
    """Logits [LENGTH, vocab] of IDS, computed `chunk` tokens at a time in the given pages."""
    kv, parts = decoder.new_kv(max(pages) + 1), []
    for start in range(0, LENGTH, chunk):
        packed = pack([(IDS[start : start + chunk], start, pages)])
        parts.append(run_pass(decoder, packed, kv, [GREEDY] * len(packed.wanted)).logits)
    return np.concatenate(parts)


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_float32_equals_the_reference(case: str) -> None:
    config = FAMILY_CASES[case]
    expected = logits_of(ReferenceDecoder(config, tiny_weights(config, dtype=torch.float32)))
    decoder = native(config, "f32")
    for chunk, pages in ((LENGTH, SHUFFLED), (33, list(range(19))), (1, SHUFFLED)):
        assert np.abs(logits_of(decoder, chunk, pages) - expected).max() < 1e-4


@pytest.mark.parametrize(("kv", "most"), [("f16", 2e-3), ("i16", 2e-3), ("i8", 0.03)])
@pytest.mark.parametrize("case", [c for c in FAMILY_CASES if FAMILY_CASES[c].experts is None])
def test_rounded_kv_comes_close(case: str, kv: str, most: float) -> None:
    config = FAMILY_CASES[case]
    expected = logits_of(native(config, "f32", kv="f32"))
    got = logits_of(native(config, "f32", kv=kv), 7)
    assert np.sqrt(((got - expected) ** 2).mean()) < most * expected.std()


@pytest.mark.parametrize(("types", "most"), [("bf16", 0.05), ("int8", 0.08), ("int4", 0.9), ("int4_row", 0.9)])
def test_rounded_weights_come_close(types: str, most: float) -> None:
    config = FAMILY_CASES["wide"]
    expected = logits_of(ReferenceDecoder(config, tiny_weights(config, dtype=torch.float32)))
    got = logits_of(native(config, types, kv="f16"))
    assert np.sqrt(((got - expected) ** 2).mean()) < most * expected.std()


def check_batches(config: ModelConfig, types: str, kv: str) -> None:
    decoder = native(config, types, kv=kv)
    expected = logits_of(decoder)
    for chunk, pages in (
        (1, SHUFFLED),
        (2, SHUFFLED),
        (5, list(range(19))),
        (17, SHUFFLED),
        (100, list(range(19))),
    ):
        np.testing.assert_array_equal(logits_of(decoder, chunk, pages), expected)
    np.testing.assert_array_equal(logits_of(native(config, types, 3, kv), 7), expected)
    texts = [(IDS[:90], 0, range(6)), (IDS[:3], 0, [9]), (IDS[:LENGTH], 0, range(20, 39)), (IDS[:17], 0, [10, 11])]
    packed = pack(texts)
    together = run_pass(decoder, packed, decoder.new_kv(40), [GREEDY] * len(packed.wanted)).logits
    for (ids, *_), start in zip(texts, packed.cu_len, strict=False):
        np.testing.assert_array_equal(together[start : start + len(ids)], expected[: len(ids)])


def batch_cases() -> Iterator[Any]:
    """All types of weights with all of KV for one model; one of KV for each other, in turn; the rest nightly."""
    for turn, case in enumerate(BATCH_CASES):
        for index, types in enumerate(WEIGHTS):
            for number, kv in enumerate(KV_TYPES):
                now = turn == 0 or (turn + index) % len(KV_TYPES) == number
                yield pytest.param(case, types, kv, marks=() if now else pytest.mark.nightly)


@pytest.mark.parametrize(("case", "types", "kv"), batch_cases())
def test_a_token_does_not_see_its_batch(case: str, types: str, kv: str) -> None:
    """Every chunk, page order, neighbour and number of threads gives the same bits."""
    check_batches(FAMILY_CASES[case], types, kv)


@pytest.mark.parametrize("kv", ["f32", "i16"])
@pytest.mark.parametrize("case", MORE_BATCH_CASES)
def test_a_token_of_any_family_does_not_see_its_batch(case: str, kv: str) -> None:
    check_batches(FAMILY_CASES[case], "int8", kv)


EDITS = Edits(
    np.array([0, 3, 255, 256, 319]),
    np.array([1.5, 1.0, 1.5, 1.0, 2.0], np.float32),
    np.array([0.0, -np.inf, 2.0, 4.0, 1.0], np.float32),
)


@pytest.mark.parametrize("types", ["f32", "int8"])
def test_all_kinds_choose_the_same_token(types: str) -> None:
    """What is chosen tile by tile is what the sampler chooses from the row of logits."""
    config = tiny_config("llama", vocab_size=700)
    decoder = native(config, types, 2)
    rows = run_pass(decoder, pack([(IDS, 0, SHUFFLED)]), decoder.new_kv(19), [GREEDY] * LENGTH).logits
    specs = [
        SamplingSpec("noisy", SamplingParams(temperature=t), 11, 2, position, EDITS if position % 2 else None)
        for position, t in zip(range(LENGTH), [0.0, 0.7, 1.0, 1e-7, 9.0] * LENGTH, strict=False)
    ]
    filters = [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 300, "top_p": 0.9}, {}]
    sampled = [
        c._replace(kind="sampled", params=replace(c.params, logprobs=1, **f))
        for c, f in zip(specs, filters * LENGTH, strict=False)
    ]
    plain = [SamplingSpec("argmax", SamplingParams(temperature=0.0))] * LENGTH
    for asked in (
        specs,
        plain,
        [p if i % 3 else c for i, (p, c) in enumerate(zip(plain, specs, strict=True))],
        sampled,
        [p if i % 3 else c for i, (p, c) in enumerate(zip(specs, sampled, strict=True))],
    ):
        got = run_pass(decoder, pack([(IDS, 0, SHUFFLED)]), decoder.new_kv(19), asked)
        wanted = [i for i, c in enumerate(asked) if c.kind == "sampled"]
        assert (got.logits is None) == (not wanted)
        assert got.logits is None or np.array_equal(got.logits, rows[wanted])
        assert got.token_ids.tolist() == [choose_token(row, c) for row, c in zip(rows, asked, strict=True)]
        assert got.margins is None
        told = run_pass(
            decoder, pack([(IDS, 0, SHUFFLED)]), decoder.new_kv(19), [c._replace(margin=True) for c in asked]
        )
        assert told.token_ids.tolist() == got.token_ids.tolist()
        expected = [choose_ahead(row, c)[1] for row, c in zip(rows, asked, strict=True)]
        assert told.margins == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("size", [300, 320, 340])
def test_another_vocabulary_is_cut_or_padded(size: int) -> None:
    """A drafter's rows of logits have its target's length, whichever is longer."""
    config = FAMILY_CASES["llama"]
    weights = tiny_weights(config, dtype=torch.float32)
    packed = pack([(IDS[:9], 0, [0])])
    noisy = SamplingSpec(
        "noisy", SamplingParams(temperature=0.5), edits=Edits(np.array([339]), *np.ones((2, 1), np.float32))
    )
    for decoder in (native(config, "f32"), ReferenceDecoder(config, weights)):
        chosen = run_pass(decoder, packed, decoder.new_kv(1), [GREEDY] * 9, vocab_size=size)
        assert chosen.logits.shape == (9, size)
        assert np.isneginf(chosen.logits[:, 320:]).all()
        assert np.isfinite(chosen.logits[:, :320]).all()
        if size == 340:
            assert (
                run_pass(decoder, packed, decoder.new_kv(1), [noisy] * 9, vocab_size=size).token_ids < 320
            ).all()


def test_first_layers_alone_are_a_shallow_model() -> None:
    config = tiny_config("llama", num_layers=3)
    weights = tiny_weights(config, dtype=torch.float32)
    packed = pack([(IDS[:40], 0, range(3))])
    decoder, twin = native(config, "f32"), ReferenceDecoder(config, weights)
    got = run_pass(decoder, packed, decoder.new_kv(3), [GREEDY] * 40, num_layers=2).logits
    expected = run_pass(twin, packed, twin.new_kv(3), [GREEDY] * 40, num_layers=2).logits
    assert np.abs(got - expected).max() < 1e-4


def test_a_pass_without_outputs_ends_at_the_last_keys_that_it_stores() -> None:
    """Layers that share keys are left out of a prompt's chunk; taps and later tokens are as they were."""
    config = tiny_config("gemma4_text", num_layers=3)
    decoder, twin = native(config, "f32"), ReferenceDecoder(config, tiny_weights(config, dtype=torch.float32))
    chunk, rest = pack([(IDS[:40], 0, range(3))]), pack([(IDS[40:48], 40, range(3))])
    kv, other = decoder.new_kv(3), twin.new_kv(3)
    quiet = replace(chunk, wanted=np.empty(0, np.int64))
    for taps in ((), (1,), (2,), (3,)):
        got = run_pass(decoder, quiet, kv, [], taps=taps).taps
        expected = run_pass(twin, quiet, other, [], taps=taps).taps
        assert all(np.abs(got[tap] - expected[tap]).max() < 1e-4 for tap in taps)
    after = [run_pass(d, rest, k, [GREEDY] * 8).logits for d, k in ((decoder, kv), (twin, other))]
    assert np.abs(after[0] - after[1]).max() < 1e-4


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_pages_of_unlike_layers_move(kind: str) -> None:
    """Keys and values of heads of two sizes, those of sharing layers stored once."""
    config = tiny_config("gemma4_text", num_layers=3)
    weights = tiny_weights(config, dtype=torch.float32)
    decoder = native(config, "int8", kv="i16") if kind == "native" else ReferenceDecoder(config, weights)
    kv, other = decoder.new_kv(2), decoder.new_kv(3)
    run_pass(decoder, pack([(IDS[:16], 0, [0])]), kv, [GREEDY] * 16)
    data = np.zeros(kv.page_bytes, np.uint8)
    kv.read_page(0, data)
    other.write_page(1, data)
    places = ((kv, [0, 1]), (other, [1, 2]))
    one, two = (run_pass(decoder, pack([(IDS[16:20], 16, pages)]), k, [GREEDY] * 4).logits for k, pages in places)
    assert (one == two).all()
    if kind == "reference":
        assert kv.page_bytes == 16 * kv.bytes_per_token == 16 * 2 * 4 * (2 * 8 + 12)


def test_taps_are_those_of_the_reference() -> None:
    config = tiny_config("llama", num_layers=3)
    decoder, twin = native(config, "f32"), ReferenceDecoder(config, tiny_weights(config, dtype=torch.float32))
    packed = pack([(IDS[:40], 0, range(3)), (IDS[:9], 0, [3])])
    got = run_pass(decoder, packed, decoder.new_kv(4), [GREEDY] * 49, taps=(0, 2, 3)).taps
    expected = run_pass(twin, packed, twin.new_kv(4), [GREEDY] * 49, taps=(0, 2, 3)).taps
    assert list(got) == list(expected) == [0, 2, 3]
    for tap, states in expected.items():
        assert got[tap].shape == states.shape == (49, config.hidden_size)
        assert np.abs(got[tap] - states).max() < 1e-4


@pytest.mark.parametrize("threads", [2, 3])
def test_a_pass_beside_the_caller_says_what_a_call_does(threads: int) -> None:
    """Also if others of its team, or of its own decoder, come in between; and if nobody waits for it."""
    config, team = tiny_config("llama", num_layers=3), kernels.ThreadPool(threads)
    weights = tiny_weights(config, dtype=torch.float32)
    decoder, other = (pack_decoder(config, weights, team, "int8", "f32") for _ in range(2))
    assert decoder.capabilities.asynchronous

    def begin(packed: Packed, kv: KV, specs: list[SamplingSpec], taps: tuple[int, ...]) -> Pending:
        return decoder.launch(PassRequest(packed, kv, specs, taps=taps))

    long, short = pack([(IDS[:90], 0, range(6)), (IDS[:9], 0, [6])]), pack([(IDS[5:40], 0, range(7, 10))])
    specs = [SamplingSpec("argmax", SamplingParams()), SamplingSpec("sampled", SamplingParams()), GREEDY]

    def asked(packed: Packed) -> list[SamplingSpec]:
        return [specs[i % 3] for i in range(len(packed.wanted))]

    expected = {
        packed: run_pass(other, packed, other.new_kv(10), asked(packed), taps=(0, 3)) for packed in (long, short)
    }

    def check(packed: Packed, got: PassResult) -> None:
        of = expected[packed]
        for mine, its in (
            (got.token_ids, of.token_ids),
            (got.logits, of.logits),
            *zip(got.taps.values(), of.taps.values(), strict=True),
        ):
            np.testing.assert_array_equal(mine, its)

    kv = decoder.new_kv(10)
    for between in (None, decoder, other, None):
        begun = begin(long, kv, asked(long), taps=(0, 3))
        if between is not None:
            check(short, run_pass(between, short, between.new_kv(10), asked(short), taps=(0, 3)))
        check(long, begun.wait())
        check(long, begun.wait())
    begin(long, kv, asked(long), taps=(0, 3))  # dropped
    first = begin(short, kv, asked(short), taps=(0, 3))
    second = begin(long, kv, asked(long), taps=(0, 3))
    check(long, second.wait())
    check(short, first.wait())


def test_one_thread_alone_begins_nothing() -> None:
    assert not native(FAMILY_CASES["llama"], "int8", 1).capabilities.asynchronous


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("first", [1, 16, 37, 255, 256, 270])
def test_a_row_may_see_keys_from_a_later_one_on(first: int, kv: str) -> None:
    """What lies before the first key does not matter, not even NaN; the batch, chunk and threads do not either."""
    config = FAMILY_CASES["wide"]
    weights = tiny_weights(config, dtype=torch.float32)
    broken = {name: w * float("nan") for name, w in weights.items()}
    twin = ReferenceDecoder(config, weights)
    results = []
    for decoder, chunk in ((twin, 300), (native(config, "f32", 1, kv), 300), (native(config, "f32", 3, kv), 7)):
        store = decoder.new_kv(20)
        spoiler = pack_decoder(config, broken, kernels.ThreadPool(1), "f32", kv) if decoder is not twin else twin
        run_pass(spoiler, pack([(IDS[:first], 0, SHUFFLED)]), store, [GREEDY] * first)
        rows = []
        for start in range(first, LENGTH, chunk):
            packed = pack([(IDS[start : start + chunk], start, SHUFFLED), ([5], 0, [19])])
            packed = replace(packed, first_keys=np.array([first, 0]))
            rows.append(run_pass(decoder, packed, store, [GREEDY] * len(packed.wanted)).logits[:-1])
        results.append(np.concatenate(rows))
    assert np.abs(results[1] - results[0]).max() < (1e-4 if kv == "f32" else 0.02 if kv != "i8" else 0.4)
    np.testing.assert_array_equal(results[2], results[1])
    if first > 1:
        assert np.abs(results[0] - logits_of(twin)[first:]).max() > 0.01, "it matters"


def test_products_of_one_matrix() -> None:
    x, w = np.random.default_rng(3).standard_normal((2, 70, 96)).astype(np.float32)
    for types, most in (("f32", 1e-4), ("bf16", 0.3), ("int8", 0.5)):
        out = np.empty((70, 70), np.float32)
        kernels.multiply(kernels.ThreadPool(2), kernels.pack(w, types), x, out)
        assert np.abs(out - x @ w.T).max() < most
    with pytest.raises(ValueError, match="do not fit"):
        kernels.multiply(kernels.ThreadPool(1), kernels.pack(w, "f32"), x[:, :90].copy(), out)


def spread(x: np.ndarray) -> np.ndarray:
    """The twin of `hadamard`: sums and differences of ever farther places of each block, rows padded to 64."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 64)))
    block, apart = x.shape[1] & -x.shape[1], 1
    while apart < block:
        pairs = x.reshape(len(x), -1, 2, apart)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(x.shape)
        apart *= 2
    return x


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as whole numbers of 8 bits, and their scales."""
    single = np.float32
    top = np.abs(x).max(axis=1)
    return np.rint(x * (single(127) / top)[:, None]).astype(np.int64), top / single(127)


def odd_halves(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights as odd numbers from -15 to 15, and half the step of each row, which comes nearest by squares."""
    single = np.float32
    step = single(0.335) * np.sqrt(in_lanes(w.astype(float) ** 2, 8) / w.shape[1]).astype(single)
    odd = np.zeros(w.shape, np.int64)
    for last in (False, False, False, False, True):
        odd = 2 * np.clip(w / step[:, None] + single(8), 0, 15).astype(np.int64) - 15
        if not last:
            step = (in_lanes(odd / 2 * w, 16) / in_lanes((odd / 2) ** 2, 16)).astype(single)
    return odd, step / single(2)


def in_lanes(rows: np.ndarray, num: int) -> np.ndarray:
    """The sum of each row: one for each lane, its first number first, then the lanes' in order."""
    lanes = np.cumsum(rows.reshape(len(rows), -1, num), axis=1)[:, -1]
    sums: np.ndarray = np.cumsum(lanes, axis=1)[:, -1]
    return sums


def spread_product(types: str, w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The twin of products beside int8 and int4_row weights: both spread and rounded, whole sums, scaled once."""
    wide = spread(w)
    rounded = quantised if types == "int8" else odd_halves
    q, w_scales = rounded(wide / np.float32(wide.shape[1] & -wide.shape[1]))
    rows, x_scales = quantised(spread(x))
    found: np.ndarray = (rows @ q.T).astype(np.float32) * x_scales[:, None] * w_scales
    return found


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 24, 31, 33, 40, 100])
@pytest.mark.parametrize("shape", [(70, 90), (33, 64), (33, 256), (200, 576), (64, 1536), (40, 2048)])
@pytest.mark.parametrize("types", ["int8", "int4_row"])
def test_whole_products_are_the_twins_to_the_bit(types: str, shape: tuple[int, int], num_rows: int) -> None:
    random = np.random.default_rng(2)
    w = random.standard_normal(shape).astype(np.float32)
    x = (random.standard_normal((num_rows, shape[1])) * random.uniform(0.1, 30, shape[1])).astype(np.float32)
    out = np.empty((num_rows, shape[0]), np.float32)
    kernels.multiply(kernels.ThreadPool(2), kernels.pack(w, types), x, out)
    np.testing.assert_array_equal(out, spread_product(types, w, x))


def test_an_outlier_is_shared_out_over_its_block() -> None:
    """One number of 200 beside many of 1: with one scale a row these would be rounded to whole numbers."""
    random = np.random.default_rng(6)
    w = random.standard_normal((96, 576)).astype(np.float32)
    x = random.standard_normal((4, 576)).astype(np.float32)
    x[:, 5] = 200.0
    out = np.empty((4, 96), np.float32)
    kernels.multiply(kernels.ThreadPool(1), kernels.pack(w, "int8"), x, out)
    rows, scales = quantised(x)
    as_they_are = (rows * scales[:, None]) @ w.T
    assert np.abs(out - x @ w.T).mean() < np.abs(as_they_are - x @ w.T).mean() / 4


def test_others_may_use_the_same_registers_between_two_runs() -> None:
    """A library that trains shapes a thread's tiles for itself."""
    random = np.random.default_rng(2)
    w, x = random.standard_normal((64, 64)).astype(np.float32), random.standard_normal((16, 64)).astype(np.float32)
    team, packed, wide = kernels.ThreadPool(1), kernels.pack(w, "int8"), torch.ones(256, 256, dtype=torch.bfloat16)
    for num_rows in (16, 9, 16, 9):
        out = np.empty((num_rows, 64), np.float32)
        kernels.multiply(team, packed, x[:num_rows].copy(), out)
        np.testing.assert_array_equal(out, spread_product("int8", w, x[:num_rows]))
        assert (wide @ wide == 256).all()
        kernels.dot_peak(team)
        again = np.empty_like(out)
        kernels.multiply(team, packed, x[:num_rows].copy(), again)
        np.testing.assert_array_equal(out, again)


def test_nothing_finite_is_told_apart() -> None:
    config = FAMILY_CASES["llama"]
    weights = tiny_weights(config, dtype=torch.float32)
    weights["layers.1.mlp_down"][3, 3] = float("nan")
    for types in WEIGHTS:
        decoder = pack_decoder(config, weights, kernels.ThreadPool(1), types, "f16")
        for kind, temperature in (("argmax", 0.0), ("noisy", 1.0), ("sampled", 0.0), ("sampled", 1.0)):
            choose = SamplingSpec(kind, SamplingParams(temperature=temperature))
            got = run_pass(decoder, pack([(IDS[:2], 0, [0])]), decoder.new_kv(1), [choose] * 2)
            assert got.token_ids.tolist() == [BROKEN, BROKEN], types


@pytest.mark.parametrize("kv", ["f32", "f16", "i16", "i8"])
def test_a_token_that_is_no_number_breaks_what_follows_and_nothing_before(kv: str) -> None:
    """Drafts come behind the tokens that plain decoding writes, in the same tile of attention."""
    config = FAMILY_CASES["llama"]
    weights = tiny_weights(config, dtype=torch.float32)
    weights["embed"][7] = float("nan")
    decoder = pack_decoder(config, weights, kernels.ThreadPool(1), "int8", kv)
    greedy = SamplingSpec("argmax", SamplingParams(temperature=0.0))

    def chosen(*ids: int) -> list[int]:
        found = run_pass(decoder, pack([(ids, 0, [0, 1])]), decoder.new_kv(2), [greedy] * len(ids))
        return found.token_ids.tolist()

    before = [i % 5 + 1 for i in range(18)]
    assert chosen(*before, 7, 2, 3) == [*chosen(*before), BROKEN, BROKEN, BROKEN]


@pytest.mark.parametrize("kv", ["f32", "f16", "i16", "i8"])
def test_one_value_that_is_no_number_is_heard_of_wherever_it_stands(kv: str) -> None:
    config = FAMILY_CASES["llama"]
    greedy = SamplingSpec("argmax", SamplingParams(temperature=0.0))
    for place in range(16):
        weights = tiny_weights(config, dtype=torch.float32)
        weights["layers.0.attn_v"][place] = float("nan")
        decoder = pack_decoder(config, weights, kernels.ThreadPool(1), "f32", kv)
        got = run_pass(decoder, pack([(IDS[:2], 0, [0])]), decoder.new_kv(1), [greedy] * 2)
        assert got.token_ids.tolist() == [BROKEN, BROKEN], place


def test_a_gate_of_an_expert_that_is_no_number_is_heard_of() -> None:
    config = FAMILY_CASES["gpt-oss"]
    weights = tiny_weights(config, dtype=torch.float32)
    names = [name for name in weights if "gate" in name and "router" not in name]
    for name in names:
        weights[name] = weights[name] * float("nan")
    decoder = pack_decoder(config, weights, kernels.ThreadPool(1), "f32", "f16")
    greedy = SamplingSpec("argmax", SamplingParams(temperature=0.0))
    got = run_pass(decoder, pack([(IDS[:2], 0, [0])]), decoder.new_kv(1), [greedy] * 2)
    assert names
    assert got.token_ids.tolist() == [BROKEN, BROKEN]


def test_an_unknown_instruction_set_is_refused() -> None:
    environment = {**os.environ, "PACELINE_ISA": "avx-512"}
    code = "from paceline import kernels; kernels.isa()"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode
    assert "it has" in found.stderr


def test_caps_keep_what_is_no_number() -> None:
    config = replace(FAMILY_CASES["llama"], score_cap=20.0, logit_cap=30.0)
    weights = tiny_weights(config, dtype=torch.float32)
    weights["layers.1.mlp_down"][3, 3] = float("nan")
    decoder = pack_decoder(config, weights, kernels.ThreadPool(1), "f32", "f16")
    greedy = SamplingSpec("argmax", SamplingParams(temperature=0.0))
    got = run_pass(decoder, pack([(IDS[:2], 0, [0])]), decoder.new_kv(1), [greedy] * 2)
    assert got.token_ids.tolist() == [BROKEN, BROKEN]


@pytest.mark.parametrize("types", WEIGHTS)
def test_packed_rows_can_be_read_back(types: str) -> None:
    weights = np.random.default_rng(1).standard_normal((70, 96)).astype(np.float32)
    matrix, row = kernels.pack(weights, types), np.empty(96, np.float32)
    most = {"f32": 1e-9, "bf16": 0.02, "int8": 0.02, "int4": 0.25, "int4_row": 0.6}[types]
    for index in (0, 31, 32, 69):
        matrix.row(index, row)
        assert np.abs(row - weights[index]).max() < most


@pytest.mark.parametrize("types", WEIGHTS)
def test_rows_of_a_matrix_are_packed_to_the_bits_of_one_after_another(types: str) -> None:
    """In any order, some twice, on several threads."""
    weights = np.random.default_rng(2).standard_normal((70, 96)).astype(np.float32)
    source, ids = kernels.pack(weights, types), np.array([69, 3, 3, *range(64, 1, -1), 0])
    rows = np.empty((len(ids), 96), np.float32)
    for index, row in zip(ids.tolist(), rows, strict=True):
        source.row(index, row)
    for kind in WEIGHTS:
        found, twin = kernels.pack_rows(kernels.ThreadPool(2), source, ids, kind), kernels.pack(rows, kind)
        assert all(map(np.array_equal, kernels.buffers(found), kernels.buffers(twin)))
    for wrong in ([0, 70], [-1], []):
        with pytest.raises(ValueError, match=r"no such row|1 to 2\*\*24 rows"):
            kernels.pack_rows(kernels.ThreadPool(1), source, np.array(wrong, np.int64), "int8")
    with pytest.raises(ValueError, match="are kept"):
        kernels.pack_rows(kernels.ThreadPool(1), source, ids, "Q4_K")


def test_sixteen_values_lose_what_sixteen_must() -> None:
    """The best 16 values in equal steps lose 0.01154 of the squares of normal numbers (Max, 1960)."""
    weights = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float32)
    matrix, rows = kernels.pack(weights, "int4_row"), np.empty((64, 512), np.float32)
    for index, row in enumerate(rows):
        matrix.row(index, row)
    assert 0.010 < ((rows - weights) ** 2).sum() / (weights**2).sum() < 0.0120


@pytest.mark.parametrize("place", [0, 4, 5, 31])
@pytest.mark.parametrize("weight_type", ["int4", "int4_row", "int8"])
def test_rows_without_a_finite_step_stay_what_they_are(weight_type: str, place: int) -> None:
    weights = np.zeros((2, 64), np.float32)
    weights[1, place] = np.nan
    out = np.empty((1, 2), np.float32)
    kernels.multiply(kernels.ThreadPool(1), kernels.pack(weights, weight_type), np.ones((1, 64), np.float32), out)
    assert out[0, 0] == 0.0
    assert np.isnan(out[0, 1])


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("weight_type", ["int4", "int4_row", "int8"])
def test_an_input_that_is_no_number_is_heard_of_wherever_it_stands(weight_type: str, number: float) -> None:
    matrix = kernels.pack(np.eye(16, 64, dtype=np.float32), weight_type)
    for place in range(64):
        x, out = np.ones((1, 64), np.float32), np.empty((1, 16), np.float32)
        x[0, place] = number
        kernels.multiply(kernels.ThreadPool(1), matrix, x, out)
        assert not np.isfinite(out).any(), place


@pytest.mark.skipif(LESSER, reason="one level is enough")
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx2vnni", "avx512"])
def test_lesser_instruction_sets_pass_the_same_tests(isa: str) -> None:
    environment = {**os.environ, "PACELINE_ISA": isa}
    code = "from paceline import kernels; print(kernels.isa())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if found.stdout.strip() != isa:
        assert "no instruction set of this machine; it has" in found.stderr
        pytest.skip(f"this machine cannot run {isa}")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(Path(__file__))]
    subprocess.run(
        [*command, str(Path(__file__).parents[1] / "core" / "test_sampling.py")], env=environment, check=True
    )


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("order", [(), (0, 2, 1, 3)])
def test_four_bit_files_keep_their_own_values(quant: str, order: tuple[int, ...], tmp_path: Path) -> None:
    weights = np.random.default_rng(2).standard_normal((64, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[quant]
    path = tmp_path / "blocks"
    path.write_bytes(gguf.quantize(weights, kind).tobytes())
    tensor = GgufTensor(path, int(kind), (64, 96), 0, order)
    blocks, expected, row = tensor.four_bit(), tensor.read(), np.empty(96, np.float32)
    matrix = kernels.pack_int4(blocks.values, blocks.scales.view(np.uint16), blocks.minima.view(np.uint16))
    for index in range(64):
        matrix.row(index, row)
        np.testing.assert_allclose(row, expected[index], atol=1e-6)
