"""Promises of the seam, asked of every backend in the registry: its line there is all that these tests need."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.seam import PassRequest, StepLimit
from paceline.core.nouns import UNCHOSEN, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_token
from tests.backend.backends import ALL_BACKENDS, on_host
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from paceline.backend.seam import Decoder

CONFIG = tiny_config(num_layers=3)
WEIGHTS = tiny_weights(CONFIG, dtype=torch.float32)
IDS = [(7 * i * i + 3 * i) % CONFIG.vocab_size for i in range(120)]
LOGITS = SamplingSpec("logits", SamplingParams(temperature=0.0))
GREEDY = SamplingSpec("argmax", SamplingParams(temperature=0.0), margin=True)
RAGGED = [(IDS[:40], 0, [0, 1, 2]), (IDS[50:51], 0, [3]), (IDS[60:77], 0, [4, 5])]
NUM_PAGES = 9


def decoder_of(backend: str, threads: int = 1) -> Decoder:
    spec = ALL_BACKENDS[backend]
    kv_type = "f32" if spec.kv_types else spec.kv_type(None, "f32")
    return spec.load()(CONFIG, WEIGHTS, "f32", kv_type, threads)


def noisy(position: int) -> SamplingSpec:
    return SamplingSpec("noisy", SamplingParams(temperature=0.8), seed=3, position=position, margin=True)


every_backend = pytest.mark.parametrize("backend", ALL_BACKENDS)


@every_backend
def test_a_ragged_pass_says_what_the_reference_says(backend: str) -> None:
    decoder, twin = decoder_of(backend), ReferenceDecoder(CONFIG, WEIGHTS)
    packed = pack(RAGGED)
    specs = [LOGITS, GREEDY] * (len(packed.wanted) // 2)
    got, expected = (run_pass(d, packed, d.new_kv(NUM_PAGES), specs, taps=(0, 2, 3)) for d in (decoder, twin))
    assert np.abs(np.asarray(got.logits) - expected.logits).max() < 1e-3
    np.testing.assert_array_equal(got.logit_idx, expected.logit_idx)
    np.testing.assert_array_equal(got.token_ids, expected.token_ids)
    for tap in (0, 2, 3):
        assert np.abs(on_host(got.taps[tap]) - expected.taps[tap]).max() < 1e-3


@pytest.mark.parametrize(
    ("backend", "types"), [(name, kind) for name, spec in ALL_BACKENDS.items() for kind in spec.weight_types]
)
def test_all_kinds_choose_the_same_in_every_type(backend: str, types: str) -> None:
    spec = ALL_BACKENDS[backend]
    decoder = spec.load()(CONFIG, WEIGHTS, types, spec.kv_type(None, types), 1)
    packed = pack(RAGGED)
    greedy, drawn, raw = (
        run_pass(decoder, packed, decoder.new_kv(NUM_PAGES), [kind] * len(packed.wanted))
        for kind in (GREEDY, noisy(5), LOGITS)
    )
    assert raw.logits is not None
    assert raw.logits.dtype in (np.float32, np.float64)
    for chosen, kind in ((greedy, GREEDY), (drawn, noisy(5))):
        assert chosen.token_ids.tolist() == [choose_token(row, kind) for row in raw.logits]
        assert chosen.margins is not None
        assert (chosen.margins >= 0).all()


@every_backend
@pytest.mark.parametrize("threads", [1, 2])
def test_a_launched_pass_can_be_waited_for_again_and_others_may_come_between(backend: str, threads: int) -> None:
    decoder = decoder_of(backend, threads)
    packed, alone = pack(RAGGED), pack(RAGGED[:1])
    kv, other = decoder.new_kv(NUM_PAGES), decoder.new_kv(NUM_PAGES)
    pending = decoder.launch(PassRequest(packed, kv, [GREEDY] * len(packed.wanted)))
    between = run_pass(decoder, alone, other, [GREEDY] * len(alone.wanted))
    first, second = pending.wait(), pending.wait()
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    np.testing.assert_array_equal(first.token_ids[:40], between.token_ids)


@every_backend
def test_a_row_says_alone_what_it_says_among_others(backend: str) -> None:
    decoder = decoder_of(backend)
    packed = pack(RAGGED)
    together = run_pass(decoder, packed, decoder.new_kv(NUM_PAGES), [GREEDY] * len(packed.wanted)).token_ids
    apart = [
        run_pass(decoder, pack([r]), decoder.new_kv(NUM_PAGES), [GREEDY] * len(r[0])).token_ids for r in RAGGED
    ]
    np.testing.assert_array_equal(together, np.concatenate(apart))


@every_backend
def test_chunks_and_a_last_single_token_say_what_one_pass_says(backend: str) -> None:
    """K = 0: a pass of one token behind what is there; and a pass that wants nothing."""
    decoder, kv = decoder_of(backend), decoder_of(backend).new_kv(NUM_PAGES)
    whole = run_pass(decoder, pack([(IDS[:40], 0, [0, 1, 2])]), decoder.new_kv(NUM_PAGES), [GREEDY] * 40)
    chunk = replace(pack([(IDS[:39], 0, [0, 1, 2])]), wanted=np.empty(0, np.int64))
    nothing = run_pass(decoder, chunk, kv, ())
    assert len(nothing.token_ids) == 0
    last = run_pass(decoder, pack([(IDS[39:40], 39, [0, 1, 2])]), kv, [GREEDY])
    assert last.token_ids.tolist() == whole.token_ids[-1:].tolist()


@every_backend
@pytest.mark.parametrize("kind", ["argmax", "noisy"])
def test_several_steps_in_one_call_are_single_steps(backend: str, kind: str) -> None:
    decoder = decoder_of(backend)
    if not decoder.capabilities.multi_step:
        pytest.skip("it runs one step at a time")
    pieces, depths = RAGGED[:2], [5, 3]
    lengths = [len(ids) for ids, *_ in pieces]
    wide = [(ids, start, [*pages, *more]) for (ids, start, pages), more in zip(pieces, ([6], [7]), strict=True)]

    def spec(row: int, step: int) -> SamplingSpec:
        return GREEDY if kind == "argmax" else noisy(lengths[row] + step)

    packed = replace(pack(wide), wanted=np.cumsum(lengths) - 1)
    specs = [spec(row, step) for row, depth in enumerate(depths) for step in range(depth)]
    at_once = run_pass(decoder, packed, decoder.new_kv(NUM_PAGES), specs, steps=[StepLimit(d) for d in depths])
    kv, found = decoder.new_kv(NUM_PAGES), [list[int](), list[int]()]
    first = run_pass(decoder, packed, kv, [spec(0, 0), spec(1, 0)]).token_ids.tolist()
    for row in range(2):
        found[row].append(first[row])
        for step in range(1, depths[row]):
            piece = (found[row][-1:], lengths[row] + step - 1, wide[row][2])
            found[row] += run_pass(decoder, pack([piece]), kv, [spec(row, step)]).token_ids.tolist()
    assert at_once.token_ids.tolist() == found[0] + found[1]
    assert at_once.margins is not None
    assert (at_once.margins >= 0).all()
    assert UNCHOSEN not in found[0]
