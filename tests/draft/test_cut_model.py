"""Draft models that share the target's tables: on both backends, from files of 16 and 8 bits, named or shipped."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from paceline import kernels
from paceline.backend.native.cut_model import NativeCutModel
from paceline.backend.native.load import pack_decoder
from paceline.backend.reference.cut_model import ReferenceCutModel
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.core.errors import BadModelFile, ConfigError
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_token
from paceline.draft import shipped
from paceline.draft.registry import parse_spec
from paceline.model.files import hf
from paceline.model.heads.cut_model import SHARED, load_cut_model, shares_tables
from paceline.model.weights import canonical_names
from tests.draft.test_head_drafter import requests
from tests.draft.test_head_native import any_choose
from tests.engine.same_text import (
    PLAIN,
    SHARP,
    VOCAB,
    Settings,
    assert_same,
    make_engine,
    plain_answers,
    run,
    target,
)
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = np.r_[np.arange(30, 120), np.arange(140, 300)]  # those it can write
LAYERS = (0, 2)  # of the target's three


def write_cut_model(
    folder: Path, layers: tuple[int, ...] = LAYERS, *, int8: bool = False, tied: bool = True
) -> Path:
    """Cut a draft model from the target of `same_text`."""
    config = tiny_config(vocab_size=VOCAB, num_layers=3, tie_embeddings=tied)
    names = canonical_names(config, hf.MODEL_NAMES, hf.LAYER_NAMES, hf.LAYER_PREFIX)
    weights = {n: w.float().numpy() for n, w in tiny_weights(config, seed=4, embed_scale=SHARP).items()}
    tensors: dict[str, Any] = {"model.norm.weight": weights["final_norm"], "d2t": TOKENS - np.arange(len(TOKENS))}
    for place, layer in enumerate(layers):
        for name in (n for n in weights if n.startswith(f"layers.{layer}.")):
            there = names[name].replace(f"layers.{layer}.", f"layers.{place}.")
            tensors |= _stored(there, weights[name], int8=int8)
    values = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "shares": list(SHARED),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _stored(name: str, tensor: np.ndarray, *, int8: bool) -> dict[str, np.ndarray]:
    if tensor.ndim < 2 or not int8:
        return {name: tensor}
    scales = np.abs(tensor).max(1, keepdims=True) / 127
    return {name: np.round(tensor / scales).astype(np.int8), f"{name}_scale": scales}


def acceptance(spec: str, types: str, settings: Settings = PLAIN) -> float:
    """Serve requests of all kinds, compare every answer with plain decoding, return the share of drafts kept."""
    engine = make_engine(spec, settings, types=types)
    assert_same(plain_answers(requests(), types), run(engine, requests()))
    assert engine.stats().drafter_failures == 0
    counts = engine.stats().drafters["draft-model"]
    return counts.accepted / sum(counts.verified_at)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("types", ["f64", "int8", "int4"])
def test_a_cut_model_drafts_and_the_text_is_the_same(types: str, int8: bool, tmp_path: Path) -> None:
    spec = f"draft-model:model={write_cut_model(tmp_path, int8=int8)},k=4"
    assert 0.05 < acceptance(spec, types) < 0.9
    assert acceptance(spec, types, Settings(num_pages=12, prefill_tokens=16, prefix_cache=True)) > 0.05


@pytest.mark.parametrize("types", ["f64", "int8"])
def test_with_all_layers_only_missing_tokens_are_not_accepted(types: str, tmp_path: Path) -> None:
    own = ",weights=int8" if types == "int8" else ""
    assert acceptance(f"draft-model:model={write_cut_model(tmp_path, (0, 1, 2))},k=4{own}", types) > 0.7


@pytest.mark.parametrize("tied", [True, False])
def test_the_compiled_one_computes_what_the_readable_one_does(tied: bool, tmp_path: Path) -> None:
    config = tiny_config(vocab_size=VOCAB, num_layers=3, tie_embeddings=tied)
    weights = tiny_weights(config, seed=4, embed_scale=SHARP, dtype=torch.float32)
    small = load_cut_model(write_cut_model(tmp_path, tied=tied), config)
    whole = pack_decoder(config, weights, kernels.ThreadPool(2), "f32", "f32")
    readable, compiled = ReferenceCutModel(small, ReferenceDecoder(config, weights)), NativeCutModel(small, whole)
    packed = pack([(list(range(40, 70)), 0, [1, 2]), ([7, 8, 9], 0, [0])])
    kinds = [
        SamplingSpec("logits", SamplingParams()),
        SamplingSpec("argmax", SamplingParams(temperature=0.0)),
    ] * 17
    ours, theirs = (run_pass(d, packed, d.new_kv(3), kinds[:33], taps=(0, 2)) for d in (compiled, readable))
    assert np.array_equal(ours.token_ids, theirs.token_ids)
    assert set(ours.token_ids[1::2]) <= set(TOKENS.tolist())
    assert ours.logits is not None
    assert theirs.logits is not None
    assert ours.logits.shape == (17, VOCAB)
    assert np.array_equal(np.isfinite(ours.logits[0]).nonzero()[0], TOKENS)
    assert np.allclose(ours.logits[:, TOKENS], theirs.logits[:, TOKENS], atol=2e-3)
    assert np.allclose(ours.taps[2], theirs.taps[2], atol=2e-3)
    assert 0 < compiled.weight_bytes < whole.weight_bytes
    assert 0 < readable.weight_bytes


@pytest.mark.parametrize("tokens", [TOKENS, np.arange(200), np.arange(VOCAB)], ids=["some", "lowest", "all"])
def test_the_kernel_draws_what_the_spread_row_draws(tokens: np.ndarray, tmp_path: Path) -> None:
    """To the bit, with every kind of parameters; all of the target's ids need no rows of their own in memory."""
    config = tiny_config(vocab_size=VOCAB, num_layers=3, tie_embeddings=True)
    weights = tiny_weights(config, seed=4, embed_scale=SHARP, dtype=torch.float32)
    whole = pack_decoder(config, weights, kernels.ThreadPool(2))
    some = load_cut_model(write_cut_model(tmp_path), config)
    cut = (replace(some, token_ids=ids) for ids in (tokens, np.arange(VOCAB)))
    small, every = (NativeCutModel(one, whole, weight_type="int8") for one in cut)
    assert (small.weight_bytes == every.weight_bytes) == (len(tokens) == VOCAB)
    random = np.random.default_rng(2)
    packed = pack([(random.integers(0, VOCAB, 90).tolist(), 0, list(range(6)))])
    wanted = [SamplingSpec("logits", SamplingParams())] * 90
    logits, full = (run_pass(d, packed, d.new_kv(6), wanted).logits for d in (small, every))
    assert logits is not None
    assert full is not None
    assert np.isneginf(np.delete(logits, tokens, axis=1)).all()
    assert np.allclose(logits[:, tokens], full[:, tokens], atol=0.05)  # rows packed anew are rounded anew
    asked = [any_choose(random, VOCAB, position) for position in range(90)]
    chosen = run_pass(small, packed, small.new_kv(6), asked)
    assert chosen.token_ids.tolist() == [choose_token(x, c) for x, c in zip(logits, asked, strict=True)]
    assert len(set(chosen.token_ids.tolist())) > 30


def test_a_draft_model_without_a_name_is_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match="paceline train draft-model"):
        make_engine("draft-model", PLAIN)
    write_cut_model(tmp_path / target().fingerprint / "draft-model")
    assert acceptance("draft-model:k=3", "int8") > 0.05


def test_what_it_costs_is_known_from_its_files(tmp_path: Path) -> None:
    spec = parse_spec(f"draft-model:model={write_cut_model(tmp_path)}")
    assert spec is not None
    layer = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32
    assert spec.num_weights(None) == 2 * layer + 32  # type: ignore[arg-type] - a named one needs no target


def test_other_folders_are_no_such_models(tmp_path: Path) -> None:
    assert not shares_tables(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not shares_tables(tmp_path)
    write_cut_model(tmp_path)
    tensors = {"d2t": -np.arange(3), "model.norm.weight": np.ones(32, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadModelFile):
        load_cut_model(tmp_path, target().decoder.config)
