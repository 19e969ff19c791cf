"""Models by their shape: parsed within bounds, the same numbers everywhere, and texts of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.backend.registry import BACKENDS
from paceline.core.errors import ModelError
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.assembly.build import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from paceline.model.config import num_weights
from paceline.model.files.pull import resolve
from paceline.model.heads.checkpoint import load_head
from paceline.model.shapes import SHAPES, read_shape
from paceline.model.weights import load_model, load_template, load_tokenizer
from tests.backend.backends import ALL_BACKENDS
from tests.engine.same_text import run
from tests.model.helpers import pack, run_pass

DRAFTS = ("eagle3:model=shape:eagle3/64", "peagle:model=shape:peagle", "draft-model:model=shape:vocab_size=300")
SMALL = "shape:vocab_size=300,hidden_size=64,intermediate_size=96,num_layers=6,head_dim=16"
GREEDY = SamplingSpec("argmax", SamplingParams(temperature=0.0))


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("qwen3-8b", 8.19), ("qwen3-32b", 32.76), ("qwen3-1.7b", 1.72), ("qwen3-0.6b", 0.6)],
)
def test_named_shapes_are_those_of_the_models(name: str, billions: float) -> None:
    config = read_shape(f"shape:{name}").config
    assert abs(num_weights(config) / 1e9 - billions) < 0.01
    assert config.eos_ids == (config.vocab_size - 1,)


def test_keys_change_a_named_shape() -> None:
    shaped = read_shape("shape:qwen3-8b,num_layers=3,tied=1,seed=9,window=128")
    c = shaped.config
    assert (c.family, c.num_layers, c.tie_embeddings, shaped.seed) == ("qwen3", 3, True, 9)
    assert c.windows == (128, 0, 128)
    assert SHAPES["qwen3-8b"].num_layers == 36
    assert read_shape("shape:family=gemma3_text,num_layers=7,window=64").config.windows == (64,) * 5 + (0, 64)
    assert read_shape("shape:family=qwen2").config.biases


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shape:", "no shape ''"),
        ("shape:lama-3.1-8b", "did you mean 'llama-3.1-8b'"),
        ("shape:qwen3-8b,qwen3-32b", "no shape 'qwen3-32b'"),
        ("shape:layers=2", "has no 'layers'; did you mean"),
        ("shape:num_layers=-1", "whole number"),
        ("shape:num_layers=1e3", "whole number"),
        ("shape:num_layers=99999999999", "at most 9 digits"),
        ("shape:num_layers=999999999", "num_layers = 999999999"),
        ("shape:head_dim=7", "KV heads of size 7"),
        ("shape:vocab_size=256", "at least 257"),
        ("shape:family=gpt", "no family 'gpt'"),
        ("shape:family=gemma3_text,window=0", "see 0 tokens"),
    ],
)
def test_shapes_that_cannot_be_are_refused(name: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_model(name)


def test_a_shape_has_a_name_a_seed_and_finite_activations() -> None:
    assert str(resolve(SMALL)) == SMALL
    model, other = load_model(SMALL), load_model(f"{SMALL},seed=1")
    assert model.fingerprint != other.fingerprint
    weight = model.weights["layers.1.mlp_up"]
    assert weight.shape == (96, 64)
    assert abs(weight.std() * 64**0.5 - 1) < 0.05
    assert not np.array_equal(weight, model.weights["layers.0.mlp_up"])
    assert not np.array_equal(weight, other.weights["layers.1.mlp_up"])
    norm = model.weights["final_norm"]
    assert (np.abs(norm - 1) <= 0.1).all()


def test_texts_are_bytes_and_every_other_id_has_a_word() -> None:
    model = load_model(SMALL)
    tokenizer, template = load_tokenizer(model), load_template(model)
    text = "naïve 日本 \x00\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([256, 298]) == "<256><298>"
    assert tokenizer.decode([299]) == ""
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_ids == (299,)
    assert template is not None
    assert template.render([{"role": "user", "content": "Hi"}]) == "user: Hi\nassistant: "


def test_every_backend_has_the_same_weights() -> None:
    model = load_model(SMALL)
    chosen = {}
    for name, spec in ALL_BACKENDS.items():
        kv = "f32" if spec.kv_types else spec.kv_type(None, "f32")
        decoder = spec.load()(model.config, model.weights, "f32", kv, 1)
        packed = pack([(list(range(40, 70)), 0, [0, 1])])
        chosen[name] = run_pass(decoder, packed, decoder.new_kv(2), [GREEDY] * 30).token_ids.tolist()
    assert len(set(map(tuple, chosen.values()))) == 1


@pytest.mark.parametrize("backend", ["native", "reference", "cuda"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_an_engine_writes_with_shapes(backend: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, backend, ALL_BACKENDS[backend])
    limits = Limits(2, 64)
    built = build(EngineConfig(model=SMALL, draft=draft, backend=backend, weights="f32", threads=1, limits=limits))
    assert built.model_name == SMALL
    assert built.template is not None
    answers = run(built.engine, [Request("a", (1, 2, 3), SamplingParams(max_tokens=9, ignore_eos=True), seed=1)])
    assert len(answers["a"].token_ids) == 9


@pytest.mark.parametrize("name", ["shape:eagle4", "shape:eagle3/0", "shape:eagle3/301", "shape:eagle3/x"])
def test_heads_of_shapes_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ModelError):
        load_head(Path(name), load_model(SMALL).config)
