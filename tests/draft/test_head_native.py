"""Heads on the native kernels against their readable twins."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline import kernels
from paceline.backend.native.head import NativeHead
from paceline.backend.native.load import load_runner, pack_decoder
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.reference.head import ReferenceHead
from paceline.backend.seam import Features, FedBack, Packed, PassRequest, PassResult
from paceline.core.nouns import BROKEN, UNCHOSEN, Edits, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_token
from paceline.model.heads.checkpoint import Head
from paceline.model.heads.config import read_config
from tests.draft.heads import draft_ids, random_weights
from tests.draft.test_head_files import TARGET
from tests.draft.test_head_forward import CASES
from tests.model.helpers import pack
from tests.tiny import tiny_weights

LOGITS = SamplingSpec("logits", SamplingParams())
LENGTHS = (21, 6, 290)  # of the rows; the last is longer than a span of attention
IDS = np.random.default_rng(4).integers(0, TARGET.vocab_size, sum(LENGTHS))
WHOLE_VOCAB = {**CASES["first"], "draft_vocab_size": TARGET.vocab_size}


def make_head(values: dict[str, Any], own_embedding: bool = False) -> Head:
    config = read_config(values, TARGET)
    weights = {name: np.asarray(w, np.float32) for name, w in random_weights(config, seed=6).items()}
    if own_embedding:
        weights["embed"] = np.random.default_rng(8).standard_normal((320, TARGET.hidden_size), np.float32)
    return Head(config, weights, draft_ids(config, TARGET.vocab_size))


def runners(
    head: Head, types: str = "f32", kv: str = "f32", own: str | None = None
) -> tuple[ReferenceHead, NativeHead]:
    """own: type of the head's own weights."""
    weights = tiny_weights(TARGET, dtype=torch.float32)
    target = pack_decoder(TARGET, weights, kernels.ThreadPool(2), types, kv)
    return ReferenceHead(head, ReferenceDecoder(TARGET, weights)), load_runner(head, target, None, own)


def entries(chunk: int) -> list[tuple[Packed, np.ndarray]]:
    """Passes over rows of entries, which begin in slot 1, `chunk` entries of each at a time; and whose each is."""
    offsets, pages = np.cumsum([0, *LENGTHS]), [[3, 1], [0], list(range(4, 23))]
    passes = []
    for start in range(1, max(LENGTHS), chunk):
        rows = [i for i, length in enumerate(LENGTHS) if start < length]
        ends = [min(start + chunk, LENGTHS[i]) for i in rows]
        pieces = [
            (IDS[offsets[i] + start : offsets[i] + end], start, pages[i])
            for i, end in zip(rows, ends, strict=True)
        ]
        packed = replace(pack(pieces), first_keys=np.ones(len(pieces), np.int64))
        passes.append((packed, np.repeat(rows, np.diff(packed.cu_len))))
    return passes


def run_head(runner: ReferenceHead | NativeHead, packed: Packed, features: Any, kv: Any, specs: Any) -> PassResult:
    """Run a pass with these features [num_tokens, width], as if all had been fed back."""
    fed_back = FedBack(features, range(len(features)))
    given = Features(runner.new_tap_store(1), (), fed_back)
    return runner.launch(PassRequest(packed, kv, specs, features=given)).wait()


def run(runner: ReferenceHead | NativeHead, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and fed-back features of every entry, by row and position."""
    kv, results = runner.new_kv(23), {}
    random = np.random.default_rng(9)
    tapped = random.standard_normal((max(LENGTHS), 3, runner.config.tapped_size)).astype(np.float32)
    features = runner.fuse(tapped.reshape(-1, tapped.shape[-1])).reshape(len(tapped), 3, -1)
    for packed, row_of in entries(chunk):
        found = run_head(runner, packed, features[packed.positions, row_of], kv, [LOGITS] * len(packed.token_ids))
        assert (found.token_ids == UNCHOSEN).all()
        for row, position, logits, feature in zip(
            row_of, packed.positions, found.logits, found.hidden, strict=True
        ):  # type: ignore[call-overload]
            results[row, position] = logits, feature
    ordered = [results[key] for key in sorted(results)]
    return np.stack([logits for logits, _ in ordered]), np.stack([feature for _, feature in ordered])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": np.arange(5)}, "token id"),
    ({"token_ids": np.arange(320) - 1}, "lie in"),
    ({"token_ids": np.arange(320) + 1}, "lie in"),
    ({"fusing_vectors": {"fc_bias": np.zeros(3, np.float32)}}, "fc_bias"),
    ({"fusing_matrices": {}}, "norm"),
    ({"fusing_matrices": {"fc": kernels.pack(np.zeros((32, 32), np.float32), "f32")}}, "fc"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_the_border_refuses_what_does_not_fit(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, weights = kernels.Decoder, tiny_weights(TARGET, dtype=torch.float32)
    target = pack_decoder(TARGET, weights, kernels.ThreadPool(1), "f32", "f32")
    monkeypatch.setattr(kernels, "Decoder", lambda **given: make(**(given | change)))
    with pytest.raises(ValueError, match=reason):
        load_runner(make_head(CASES["eagle, first"]), target)


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_the_twin(case: str) -> None:
    reference, native = runners(make_head(CASES[case]))
    (logits, fed), (expected, expected_fed) = run(native, 300), run(reference, 300)
    outside = np.isneginf(expected)
    assert (np.isneginf(logits) == outside).all()
    assert outside.any() == (native.config.draft_vocab_size < TARGET.vocab_size)
    assert np.abs(np.where(outside, 0, logits - np.where(outside, 0, expected))).max() < 1e-3
    assert np.abs(fed - expected_fed).max() < 1e-3 * np.abs(expected_fed).max()


def test_an_embedding_in_the_file_counts() -> None:
    reference, native = runners(make_head(WHOLE_VOCAB, own_embedding=True))
    expected, other = run(reference, 300)[0], run(runners(make_head(WHOLE_VOCAB))[0], 300)[0]
    assert np.abs(run(native, 300)[0] - expected).max() < 1e-3
    assert np.abs(other - expected).max() > 0.1


@pytest.mark.parametrize(
    ("types", "kv", "own", "most"),  # int4: the target's own embedding
    [
        ("int8", "i16", "int8", 0.1),
        ("int8", "i16", None, 0.4),
        ("int4", "i8", "int8", 0.3),
        ("int4", "i8", None, 0.5),
        ("bf16", "f16", None, 0.1),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_rounded_weights_come_close_and_chunks_do_not_matter(
    case: str, types: str, kv: str, own: str | None, most: float
) -> None:
    head = make_head(CASES[case])
    reference, native = runners(head, types, kv, own)
    (logits, fed), (expected, _) = run(native, 300), run(reference, 300)
    known = np.isfinite(expected)
    error = np.sqrt(np.square(logits[known] - expected[known]).mean())
    assert error < most * expected[known].std()
    for chunk in (1, 5, 64):
        again, fed_again = run(native, chunk)
        np.testing.assert_array_equal(again, logits)
        np.testing.assert_array_equal(fed_again, fed)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 300])
@pytest.mark.parametrize("case", CASES)
def test_features_are_the_twins(case: str, num_tokens: int) -> None:
    reference, native = runners(make_head(CASES[case]))
    random, shape = np.random.default_rng(5), (num_tokens, native.config.tapped_size)
    states = random.standard_normal(shape).astype(np.float32) * 30
    features = native.fuse(states)
    assert features.shape == (num_tokens, native.config.layers.hidden_size)
    np.testing.assert_allclose(features, reference.fuse(states), rtol=1e-3, atol=1e-3)
    alone = [native.fuse(states[i : i + 1]) for i in range(num_tokens)]
    np.testing.assert_array_equal(features, np.concatenate([features[:0], *alone]), "how many at once: no matter")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"states": np.zeros((2, 127), np.float32)}, "do not fit the matrix"),
        ({"features": np.zeros((2, 65), np.float32)}, "do not fit the matrix"),
        ({"features": np.zeros((1, 64), np.float32)}, "do not fit the matrix"),
        ({"norms": np.ones((3, 64), np.float32)}, "do not fit the states"),
    ],
)
def test_states_that_do_not_fit_are_refused(change: dict[str, Any], reason: str) -> None:
    fitting: dict[str, Any] = {
        "fc": kernels.pack(np.zeros((64, 128), np.float32), "int8"),
        "states": np.zeros((2, 128), np.float32),
        "norms": np.ones((2, 64), np.float32),
        "eps": 1e-5,
        "features": np.ones((2, 64), np.float32),
    }
    kernels.fuse(kernels.ThreadPool(1), **fitting)
    assert not fitting["features"].any()
    with pytest.raises(ValueError, match=reason):
        kernels.fuse(kernels.ThreadPool(1), **(fitting | change))


@pytest.mark.parametrize("case", ["first", "eagle, first", "normed heads"])
def test_what_nobody_reads_leaves_its_keys_and_values(case: str) -> None:
    """To the bit as if all of the pass had been computed."""
    _, native = runners(make_head(CASES[case]), "int8", "i16")
    random = np.random.default_rng(3)
    ids, features = IDS[:40], random.standard_normal((40, TARGET.hidden_size)).astype(np.float32)
    found = []
    for cuts in ([0, 40], [0, 39, 40]):
        kv = native.new_kv(4)
        for start, end in itertools.pairwise(cuts):
            piece = pack([(ids[start:end], start, [2, 0, 1])])
            packed = replace(piece, wanted=piece.wanted[-1:] if end == 40 else piece.wanted[:0])
            chosen = run_head(native, packed, features[start:end], kv, [LOGITS] * len(packed.wanted))
        found.append(chosen.logits)
    assert np.array_equal(*found)


@pytest.mark.parametrize("name", ["first", "whole", "eagle, first"])
def test_choices_are_made_among_the_targets_ids(name: str) -> None:
    """Noise and edits go by the target's ids, whatever the order of the head's own."""
    packed, _ = entries(21)[0]
    features = np.random.default_rng(5).standard_normal((len(packed.token_ids), TARGET.hidden_size))
    head = make_head({**CASES, "whole": WHOLE_VOCAB}[name])
    edits = Edits(np.array([33, 40, 70, 301]), np.array([1, 1.5, 1, 2], np.float32), np.array([4, 0, -np.inf, 3]))
    edits = replace(edits, add=edits.add.astype(np.float32))
    asked = [
        SamplingSpec("argmax", SamplingParams(temperature=0.0)),
        SamplingSpec("noisy", SamplingParams(temperature=0.8), 5, 1, 17, edits),
        SamplingSpec("sampled", SamplingParams(temperature=1.2, top_k=9), 5, 0, 18),
    ] * len(packed.token_ids)
    asked = asked[: len(packed.token_ids)]
    for runner in runners(head):
        logits = run_head(runner, packed, features, runner.new_kv(23), [LOGITS] * len(asked)).logits
        chosen = run_head(runner, packed, features, runner.new_kv(23), asked)
        for index, (row, choose) in enumerate(zip(logits, asked, strict=True)):
            got = int(chosen.token_ids[index])
            if isinstance(runner, NativeHead):
                assert got != UNCHOSEN
            if got == UNCHOSEN:
                assert np.array_equal(chosen.logits[chosen.logit_idx[index]], row)
            else:
                assert got == choose_token(row, choose)


@pytest.mark.parametrize("case", ["first", "peagle", "eagle, first"])
def test_own_tokens_are_written_in_the_targets_rows(case: str) -> None:
    """Whatever was written before them, as the readable head does; edits find them in any order."""
    random = np.random.default_rng(2)
    head = make_head({**CASES[case], "draft_vocab_size": 250})
    head = replace(head, config=replace(head.config, request_tokens=True), token_ids=np.arange(70, 320))
    others = np.setdiff1d(np.arange(TARGET.vocab_size), head.token_ids)
    packed, _ = entries(290)[0]
    features = random.standard_normal((len(packed.token_ids), TARGET.hidden_size))
    for types, close in (("f32", 1e-3), ("int8", 0.4)):
        reference, native = runners(head, types, own=types)
        for own in (np.arange(1), *(random.permutation(others)[:count] for count in (3, 20, 0, 70, 7))):
            found = []
            for runner in (reference, native):
                runner.set_request_tokens(own)
                kv = runner.new_kv(23)
                found.append(run_head(runner, packed, features, kv, [LOGITS] * len(features)).logits)
            expected, logits = found
            absent = np.setdiff1d(others, own)
            assert np.isneginf(logits[:, absent]).all()
            assert np.isfinite(logits[:, own]).all()
            apart = np.delete(logits, absent, axis=1) - np.delete(expected, absent, axis=1)
            assert np.abs(apart).max() < close
            asked = [any_choose(random, TARGET.vocab_size, position) for position in range(len(features))]
            chosen = run_head(native, packed, features, native.new_kv(23), asked)
            drawn = [choose_token(x, c) for x, c in zip(logits, asked, strict=True)]
            assert chosen.token_ids.tolist() == drawn
            assert len(own) < 20 or set(drawn) & set(own.tolist())


@pytest.mark.parametrize("case", ["first", "eagle, first", "eagle, speculators"])
@pytest.mark.parametrize("types", ["int8", "f32"])
def test_the_kernel_draws_what_the_spread_row_draws(case: str, types: str) -> None:
    """To the bit, with every kind of parameters: the slow way is to spread logits over the target's vocabulary."""
    packed, _ = entries(290)[0]
    random = np.random.default_rng(12)
    features = random.standard_normal((len(packed.token_ids), TARGET.hidden_size))
    _, native = runners(make_head(CASES[case]), types)
    logits = run_head(native, packed, features, native.new_kv(23), [LOGITS] * len(features)).logits
    assert logits is not None
    asked = [any_choose(random, TARGET.vocab_size, position) for position in range(len(features))]
    chosen = run_head(native, packed, features, native.new_kv(23), asked)
    assert [int(i) for i in chosen.token_ids] == [choose_token(x, c) for x, c in zip(logits, asked, strict=True)]
    assert chosen.logits is None or np.array_equal(chosen.logits, logits[[c.wants_logits for c in asked]])
    assert len(set(chosen.token_ids.tolist())) > 30


def any_choose(random: np.random.Generator, vocab_size: int, position: int) -> SamplingSpec:
    """Any parameters, with edits of tokens that the drafter has and of others."""
    ids = np.sort(random.choice(vocab_size, random.integers(0, 60), replace=False))
    scale, add = random.uniform(0.5, 2, len(ids)), random.normal(0, 2, len(ids))
    add[random.random(len(ids)) < 0.1] = -np.inf
    edits = Edits(ids, scale.astype(np.float32), add.astype(np.float32))
    params = SamplingParams(
        temperature=float(random.choice([0.0, 0.3, 1.0, 2.0])),
        top_k=int(random.choice([0, 0, 5, 60])),
        top_p=float(random.choice([1.0, 0.9])),
        min_p=float(random.choice([0.0, 0.02])),
    )
    kind = "sampled" if params.filtered else "noisy"
    return SamplingSpec(
        kind, params, seed=3, choice=position % 2, position=position, edits=edits if len(ids) else None
    )


@pytest.mark.parametrize("ids", [np.arange(60), np.array([5, 3, 300, 44, 0])], ids=["lowest", "any"])
def test_an_eagle_head_writes_with_some_of_its_targets_rows(ids: np.ndarray) -> None:
    """The target's lowest ids need no rows of their own in memory."""
    whole = make_head(CASES["eagle, first"])
    config = replace(whole.config, draft_vocab_size=len(ids), request_tokens=False)
    head = replace(whole, config=config, token_ids=ids)
    for types, close in (("f32", 1e-3), ("int8", 0.2)):
        (reference, native), (_, native_whole) = (runners(h, types, own=types) for h in (head, whole))
        logits, expected = run(native, 300)[0], run(reference, 300)[0]
        assert np.isneginf(np.delete(logits, ids, axis=1)).all()
        assert np.abs(logits[:, ids] - expected[:, ids]).max() < close
        assert np.abs(logits[:, ids] - run(native_whole, 300)[0][:, ids]).max() < 1e-4
        assert (native.weight_bytes == native_whole.weight_bytes) == (len(ids) == 60)


def test_features_that_are_no_numbers_are_told() -> None:
    packed, _ = entries(21)[0]
    features = np.full((len(packed.token_ids), TARGET.hidden_size), np.nan)
    kinds = [
        SamplingSpec("argmax", SamplingParams(temperature=0.0)),
        SamplingSpec("noisy", SamplingParams(), 5),
        SamplingSpec("sampled", SamplingParams(top_p=0.9), 5),
    ]
    for runner in (*runners(make_head(CASES["first"])), *runners(make_head(CASES["eagle, first"]))):
        asked = (kinds * len(features))[: len(features)]
        chosen = run_head(runner, packed, features, runner.new_kv(23), asked).token_ids
        assert set(chosen.tolist()) <= {BROKEN, UNCHOSEN}
        assert (chosen[::3] == BROKEN).all()


def test_the_border_refuses_missing_features() -> None:
    _, native = runners(make_head(CASES["first"]))
    packed, _ = entries(21)[0]
    for features in (np.zeros((3, TARGET.hidden_size)), np.zeros((len(packed.token_ids), 5))):
        with pytest.raises(ValueError, match="features"):
            run_head(native, packed, features, native.new_kv(23), [LOGITS] * len(packed.token_ids))
