"""The decoder against itself: chunks, pages, batches, taps, foreign slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.core.errors import BadModelFile
from paceline.model.config import ModelConfig, Rope, num_weights, tensor_shapes
from paceline.model.families import FAMILIES
from tests.model.helpers import logits_of, pack
from tests.tiny import tiny_config, tiny_weights

IDS = [(7 * i * i + 3 * i) % 320 for i in range(300)]


def build(family: str = "llama", **changes: object) -> ReferenceDecoder:
    config = tiny_config(family, **changes)
    return ReferenceDecoder(config, tiny_weights(config), torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 16, 150])
def test_chunks_and_page_order_do_not_matter(family: str, chunk: int) -> None:
    decoder = build(family, tie_embeddings=family == "llama")
    whole = logits_of(decoder, IDS)
    pages = [(11 * i + 5) % 19 for i in range(19)]
    torch.testing.assert_close(logits_of(decoder, IDS, chunk, pages), whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_adopts_all_weights_of_another(family: str) -> None:
    decoder = build(family)
    newer = ReferenceDecoder(decoder.config, tiny_weights(decoder.config, seed=1), torch.float64)
    before = logits_of(decoder, IDS[:20])
    decoder.adopt(newer)
    after = logits_of(decoder, IDS[:20])
    assert torch.equal(after, logits_of(newer, IDS[:20]))
    assert not torch.equal(after, before)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=8), st.randoms())
def test_rows_of_a_mixed_batch_see_only_themselves(rows: list[tuple[int, int]], random: object) -> None:
    decoder = build()
    free = list(range(8 * 7))
    random.shuffle(free)  # type: ignore[attr-defined]
    kv = decoder.new_kv(len(free))
    pieces = []
    for i, (before, now) in enumerate(rows):
        pages = [free.pop() for _ in range(-(-(before + now) // 16))]
        ids = IDS[13 * i : 13 * i + before + now]
        if before:
            decoder.forward(pack([(ids[:before], 0, pages)]), kv)
        pieces.append((ids[before:], before, pages))
    hidden, _ = decoder.forward(pack(pieces), kv)
    got = decoder.logits(hidden).split([now for _, now in rows])
    for i, (before, now) in enumerate(rows):
        alone = logits_of(decoder, IDS[13 * i : 13 * i + before + now])[before:]
        torch.testing.assert_close(got[i], alone, rtol=1e-11, atol=1e-11)


def test_what_others_left_in_the_store_does_not_get_through() -> None:
    decoder = build()
    clean = logits_of(decoder, IDS[:21], pages=[2, 5])
    dirty = decoder.new_kv(8)
    for layer in dirty.data:
        layer.fill_(float("nan"))
    assert torch.equal(logits_of(decoder, IDS[:21], pages=[2, 5], kv=dirty), clean)
    # Beside a longer row the short one is padded, also with page 0 of someone else.
    hidden, _ = decoder.forward(pack([(IDS[20:21], 20, [2, 5]), (IDS[:1], 0, [7])]), dirty)
    torch.testing.assert_close(decoder.logits(hidden)[0], clean[20], rtol=1e-11, atol=1e-11)


def test_taps_and_the_first_layers() -> None:
    decoder = build(num_layers=3)
    shallow = replace(decoder.config, num_layers=2)
    twin = ReferenceDecoder(shallow, tiny_weights(decoder.config), torch.float64)
    piece = pack([(IDS[:20], 0, [0, 1])])
    hidden, taps = decoder.forward(piece, decoder.new_kv(2), taps=(0, 2, 3))
    assert sorted(taps) == [0, 2, 3]
    assert torch.equal(taps[0], decoder.embed[torch.tensor(IDS[:20])])
    assert torch.equal(taps[3], hidden)
    early, none = decoder.forward(piece, decoder.new_kv(2, num_layers=2), num_layers=2)
    assert none == {}
    assert torch.equal(early, taps[2])
    assert torch.equal(early, twin.forward(piece, twin.new_kv(2))[0])


def test_the_store_knows_its_size() -> None:
    decoder = build(num_layers=3)
    store = decoder.new_kv(4)
    assert store.num_slots == 64
    assert store.bytes_per_token * 64 == sum(layer.numel() for layer in store.data) * 8
    assert not any(layer.any() for layer in store.data)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 3},
        {"head_dim": 7},
        {"vocab_size": 0},
        {"vocab_size": 1 << 40},
        {"num_layers": -1},
        {"hidden_size": True},
        {"norm_eps": float("nan")},
        {"eos_ids": (320,)},
        {"rope": Rope(theta=float("inf"))},
        {"rope": Rope(scaling="llama3", low_freq_factor=4.0, high_freq_factor=4.0)},
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadModelFile):
        replace(tiny_config(), **changes).check()


def test_all_weights_are_counted() -> None:
    config = tiny_config(tie_embeddings=False)
    assert num_weights(config) == sum(t.numel() for t in tiny_weights(config).values())


def test_every_family_names_its_tensors() -> None:
    def names(family: str) -> set[str]:
        return {n.removeprefix("layers.0.") for n in tensor_shapes(tiny_config(family, num_layers=1))}

    assert names("qwen2") - names("llama") == {"attn_q_bias", "attn_k_bias", "attn_v_bias"}
    assert names("qwen3") - names("llama") == {"attn_q_norm", "attn_k_norm"}
    assert isinstance(tiny_config(), ModelConfig)
