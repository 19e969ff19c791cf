"""The decoder on a host in float64 says what the reference says, for every family and every way to ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backend.cuda.decoder import CudaDecoder
from paceline.backend.cuda.device_pass import upload
from paceline.backend.cuda.kv_store import DeviceKV
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.core.nouns import BROKEN, UNCHOSEN, Edits, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.model.config import ModelConfig, Rope, Sliding
from tests.backend.backends import load_on_host
from tests.backend.cuda.interpreter import run_interpreted
from tests.model.helpers import pack, run_pass
from tests.tiny import PLAIN_FAMILIES, tiny_config, tiny_weights

IDS = [(7 * i * i + 3 * i) % 320 for i in range(300)]
RAGGED = [(IDS[:70], 0, [0, 1, 2, 3, 4]), (IDS[50:51], 0, [5]), (IDS[60:77], 0, [6, 7])]
NUM_PAGES = 10
LOGITS = SamplingSpec("logits", SamplingParams(temperature=0.0))
GREEDY = SamplingSpec("argmax", SamplingParams(temperature=0.0), margin=True)
LOCAL = Rope(theta=1e4)
MODELS: dict[str, ModelConfig] = {
    **{family: tiny_config(family, tie_embeddings=family == "llama") for family in PLAIN_FAMILIES},
    "all biases": tiny_config(biases=frozenset({"attn_q", "attn_v", "attn_o", "mlp_up", "mlp_down"})),
    "windows": tiny_config(
        "gemma3_text", num_layers=3, rope=Rope(1e6, "linear", 8.0), sliding=Sliding(9, frozenset({0, 2}), LOCAL)
    ),
    "llama 3": tiny_config(rope=Rope(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
    "rope factors": tiny_config(rope=Rope(1e4, "factors")),
    "query scalar": tiny_config(query_scalar=30.0),
    "many query heads": tiny_config(num_heads=8, num_kv_heads=1),
}


def both(config: ModelConfig) -> tuple[CudaDecoder, ReferenceDecoder]:
    weights: Any = {name: weight.numpy() for name, weight in tiny_weights(config).items()}
    ours = load_on_host(config, weights, "f64", "f64", None)
    return ours, ReferenceDecoder(config, weights, torch.float64)


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("model", MODELS)
def test_every_family_says_what_the_reference_says(model: str) -> None:
    """Whole texts, then one token more of each: the keys and values are the same, too."""
    config = MODELS[model]
    ours, twin = both(config)
    stores = ours.new_kv(NUM_PAGES), twin.new_kv(NUM_PAGES)
    taps = (0, 1, config.num_layers)
    for pieces in (RAGGED, [(IDS[i : i + 1], len(ids), pages) for i, (ids, _, pages) in enumerate(RAGGED)]):
        packed = pack(pieces)
        specs = [LOGITS, GREEDY] * (len(packed.wanted) // 2 + 1)
        got, expected = (
            run_pass(d, packed, kv, specs[: len(packed.wanted)], taps=taps)
            for d, kv in zip((ours, twin), stores, strict=True)
        )
        close(got.logits, expected.logits)
        np.testing.assert_array_equal(got.token_ids, expected.token_ids)
        close(got.margins, expected.margins)
        for tap in taps:
            close(got.taps[tap], expected.taps[tap])
    close(stores[0].data[:, :, : stores[1].num_slots], stores[1].data)


def test_the_first_layers_alone_and_a_pass_that_wants_nothing() -> None:
    config = tiny_config(num_layers=3)
    ours, twin = both(config)
    packed = pack(RAGGED)
    got, expected = (
        run_pass(d, packed, d.new_kv(NUM_PAGES, 2), [LOGITS] * len(packed.wanted), num_layers=2)
        for d in (ours, twin)
    )
    close(got.logits, expected.logits)
    nothing = run_pass(ours, replace(packed, wanted=np.empty(0, np.int64)), ours.new_kv(NUM_PAGES), ())
    assert len(nothing.token_ids) == 0
    assert nothing.logits is None


def test_padding_tokens_and_rows_change_nothing() -> None:
    """A pass padded as a graph pads it: tokens and rows at the end, in the scratch page."""
    ours, _ = both(tiny_config())
    packed, kv, padded_kv = pack(RAGGED), ours.new_kv(NUM_PAGES), ours.new_kv(NUM_PAGES)
    plain = upload(packed, torch.device("cpu"))
    more = 7

    def padded(tensor: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((more, *tensor.shape[1:]), fill)])

    with_padding = replace(
        plain,
        token_ids=padded(plain.token_ids, 0),
        positions=padded(plain.positions, 0),
        slots=padded(plain.slots, padded_kv.num_slots),
        cu_len=padded(plain.cu_len, len(plain.token_ids)),
        pages=padded(plain.pages, 0),
        wanted=padded(plain.wanted, 0),
    )
    hidden, taps = ours.forward(plain, kv, taps=(1,))
    others, other_taps = ours.forward(with_padding, padded_kv, taps=(1,))
    close(others[: len(hidden)], hidden)
    close(other_taps[1][: len(hidden)], taps[1])
    close(padded_kv.data[:, :, : kv.num_slots], kv.data[:, :, : kv.num_slots])


def test_edits_filters_and_noise_choose_what_the_reference_chooses() -> None:
    ours, twin = both(tiny_config())
    packed = pack(RAGGED)
    edits = Edits(np.array([5, 17, 300]), np.float32([1.3, 0.7, 1.0]), np.float32([0.0, 2.5, -np.inf]))
    kinds = [
        SamplingSpec("noisy", SamplingParams(temperature=0.8), seed=(1 << 62) + 5, choice=2, margin=True),
        SamplingSpec("noisy", SamplingParams(temperature=0.0), edits=edits),
        SamplingSpec("noisy", SamplingParams(temperature=1.3), seed=9, edits=edits),
        SamplingSpec("sampled", SamplingParams(temperature=1.0, top_p=0.9), seed=3),
        GREEDY,
        LOGITS,
    ]
    specs = [kinds[i % len(kinds)]._replace(position=i) for i in range(len(packed.wanted))]
    got, expected = (run_pass(d, packed, d.new_kv(NUM_PAGES), specs) for d in (ours, twin))
    np.testing.assert_array_equal(got.token_ids, expected.token_ids)
    np.testing.assert_array_equal(got.logit_idx, expected.logit_idx)
    close(got.logits, expected.logits)
    assert got.margins is not None
    assert expected.margins is not None
    close(got.margins, expected.margins)
    assert (got.token_ids[3::6] == UNCHOSEN).all()


@pytest.mark.parametrize("size", [300, 340])
def test_a_vocabulary_may_be_cut_or_padded(size: int) -> None:
    ours, twin = both(tiny_config())
    packed = pack(RAGGED)
    specs = [LOGITS, GREEDY] * (len(packed.wanted) // 2)
    got, expected = (run_pass(d, packed, d.new_kv(NUM_PAGES), specs, vocab_size=size) for d in (ours, twin))
    assert got.logits is not None
    assert got.logits.shape[1] == size
    close(got.logits, expected.logits)
    np.testing.assert_array_equal(got.token_ids, expected.token_ids)


def test_a_row_without_finite_logits_is_broken_and_the_others_go_on() -> None:
    config = tiny_config(tie_embeddings=False)
    weights, broken = tiny_weights(config), 319
    assert broken not in IDS[:77]
    weights["embed"][broken] = torch.nan
    ours = load_on_host(config, weights, "f64", "f64", None)
    pieces = [RAGGED[0], ([broken], 0, [5]), RAGGED[2]]
    token_ids = run_pass(ours, pack(pieces), ours.new_kv(NUM_PAGES), [GREEDY] * 88).token_ids
    assert token_ids[70] == BROKEN
    assert (np.delete(token_ids, 70) >= 0).all()


@pytest.mark.parametrize(
    ("types", "bound"),
    [("f32", 1e-4), ("bf16", 0.3), ("f16", 0.05), ("fp8", 1.0), ("int4", 3.0)],
)
def test_other_types_are_near(types: str, bound: float) -> None:
    config = tiny_config(tie_embeddings=False, hidden_size=128, intermediate_size=256, head_dim=32)
    weights = tiny_weights(config)
    packed = pack(RAGGED)
    twin = ReferenceDecoder(config, weights, torch.float64)
    ours = load_on_host(config, weights, types, {"f32": "f32", "f16": "f16"}.get(types, "fp8"), None)
    specs = [LOGITS] * len(packed.wanted)
    got, expected = (run_pass(d, packed, d.new_kv(NUM_PAGES), specs) for d in (ours, twin))
    assert got.logits is not None
    assert got.logits.dtype == np.float32
    error = np.abs(got.logits - expected.logits)  # type: ignore[operator]
    assert error.mean() < bound / 3
    assert error.max() < bound


def test_the_kernels_say_the_same() -> None:
    run_interpreted("interpreted_decoder.py")


def test_kv_counts_its_bytes_and_a_tied_table_counts_once() -> None:
    config = tiny_config(num_layers=3)
    weights = tiny_weights(config)
    ours, twin = both(config)
    store = ours.new_kv(4)
    assert isinstance(store, DeviceKV)
    assert store.num_slots == 64
    assert store.bytes_per_token == twin.new_kv(4).bytes_per_token
    assert ours.weight_bytes == twin.weight_bytes == 8 * sum(w.numel() for w in weights.values())
    small = load_on_host(config, weights, "bf16", "fp8", None)
    assert small.new_kv(4).bytes_per_token == 3 * 2 * config.num_kv_heads * (config.head_dim + 4)
    assert ours.describe() == "cuda, f64, this machine's cores, exact numerics"
    assert not ours.capabilities.asynchronous
