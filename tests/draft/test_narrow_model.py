"""Whole draft models that write a draft vocabulary: on both backends, the same text, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from paceline import kernels
from paceline.backend.native import cut_model as native
from paceline.backend.native.load import pack_decoder
from paceline.backend.reference import cut_model as reference
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.registry import BACKENDS, FILE
from paceline.core.errors import ConfigError
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_token
from paceline.draft.model import draft_model
from tests.draft.test_cut_model import acceptance, write_cut_model
from tests.draft.test_head_native import any_choose
from tests.engine.same_text import PLAIN, SHARP, VOCAB, Settings, make_engine, target
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.backend.seam import CutModelDecoder

TOKENS = np.arange(150)
LOGITS = SamplingSpec("logits", SamplingParams())


def narrow(types: str, *, tied: bool = True, family: str = "llama") -> CutModelDecoder:
    """A small whole model of the first tokens. types: `reference`, or of weights on `native`."""
    config = tiny_config(family, vocab_size=VOCAB, num_layers=3, tie_embeddings=tied)
    weights = tiny_weights(config, seed=4, embed_scale=SHARP, dtype=torch.float32)
    if types == "reference":
        return reference.narrowed(ReferenceDecoder(config, weights), TOKENS)
    kv = "f32" if types == "f32" else "i16"
    return native.narrowed(pack_decoder(config, weights, kernels.ThreadPool(2), types, kv), TOKENS)


@pytest.mark.parametrize(
    ("tied", "family"), [(True, "llama"), (False, "llama"), (True, "gemma3_text"), (False, "qwen2")]
)
def test_the_compiled_one_computes_what_the_readable_one_does(tied: bool, family: str) -> None:
    """Whatever the request's tokens, and for a target with more padding or less."""
    both = [narrow(types, tied=tied, family=family) for types in ("f32", "reference")]
    packed = pack([(list(range(40, 70)), 0, [1, 2]), ([7, 8, 9], 0, [0])])
    kinds = [LOGITS, SamplingSpec("argmax", SamplingParams(temperature=0.0))] * 17
    for ids, width in ((), VOCAB), ((290, 155, 300), VOCAB + 8), ((301,), VOCAB - 8):
        own = np.array(ids, np.int64)
        for decoder in both:
            decoder.set_request_tokens(own)
        ours, theirs = (run_pass(d, packed, d.new_kv(3), kinds[:33], vocab_size=width) for d in both)
        written = np.sort(np.r_[TOKENS, own])
        assert ours.logits is not None
        assert theirs.logits is not None
        assert np.array_equal(ours.token_ids, theirs.token_ids)
        assert set(ours.token_ids[1::2]) <= set(written.tolist())
        assert ours.logits.shape == theirs.logits.shape == (17, width)
        assert np.array_equal(np.isfinite(ours.logits[0]).nonzero()[0], written)
        assert np.allclose(ours.logits[:, written], theirs.logits[:, written], atol=2e-3)


@pytest.mark.parametrize("types", ["int4_row", "int8", "int4", "bf16"])
def test_the_kernel_draws_what_the_spread_row_draws(types: str) -> None:
    """To the bit, with every kind of parameters, a request's tokens among the choices."""
    decoder, random = narrow(types), np.random.default_rng(2)
    own = random.permutation(np.arange(len(TOKENS), VOCAB))[:40]
    decoder.set_request_tokens(own)
    packed = pack([(random.integers(0, VOCAB, 90).tolist(), 0, list(range(6)))])
    logits = run_pass(decoder, packed, decoder.new_kv(6), [LOGITS] * 90).logits
    asked = [any_choose(random, VOCAB, position) for position in range(90)]
    chosen = run_pass(decoder, packed, decoder.new_kv(6), asked).token_ids.tolist()
    assert logits is not None
    assert chosen == [choose_token(row, one) for row, one in zip(logits, asked, strict=True)]
    assert len(set(chosen)) > 20
    assert set(chosen) & set(own.tolist())


@pytest.mark.parametrize("types", ["f64", "int8", "int4"])
def test_the_text_is_the_same(types: str) -> None:
    spec = "draft-model:model=noisy,tokens=120,k=4"
    assert 0.05 < acceptance(spec, types) < 0.9
    small = Settings(num_pages=12, prefill_tokens=16, prefix_cache=True)
    assert acceptance(f"{spec},max_len=64", types, small) > 0.05
    assert acceptance(f"{spec},layers=2", types) > 0.05


def test_all_that_is_lost_are_tokens_that_it_does_not_write() -> None:
    rates = [acceptance(f"draft-model:model=same,tokens={n},k=3", "int8") for n in (40, 200, VOCAB - 1, VOCAB)]
    assert rates[0] < rates[1] < rates[2]
    assert rates[3] > 0.95


def test_a_large_vocabulary_is_narrowed_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = make_engine("draft-model:model=noisy", PLAIN, types="int8").drafting.drafters.values()
    monkeypatch.setattr(draft_model, "DRAFT_TOKENS", 100)
    (some,) = make_engine("draft-model:model=noisy", PLAIN, types="int8").drafting.drafters.values()
    assert [one.report().get("tokens") for one in (whole, some)] == [None, 100]
    assert some.report()["weights"] == "int8"  # what the test's loader packs


@pytest.mark.parametrize(
    ("options", "types", "reason"),
    [
        ("model=noisy,tokens=0", "f64", "between 1 and 320"),
        ("model=noisy,tokens=321", "f64", "between 1 and 320"),
        ("model=noisy,tokens=9", "cuda", "write all tokens"),
        ("model=other,tokens=9", "f64", "another vocabulary writes all"),
        ("model=CUT,tokens=9", "f64", "its file names the tokens"),
        ("layers=2,tokens=9", "f64", "goes with model=PATH"),
    ],
)
def test_tokens_that_it_cannot_write_are_refused(options: str, types: str, reason: str, tmp_path: Path) -> None:
    spec = options.replace("CUT", str(write_cut_model(tmp_path)))
    with pytest.raises(ConfigError, match=reason):
        make_engine(f"draft-model:{spec}", PLAIN, types=types)


def test_a_whole_model_has_a_type_of_its_own() -> None:
    config, weights = target().decoder.config, {"embed": np.zeros((2, 2), np.float32)}

    def chosen(backend: str, asked: str | None, beside: str) -> str:
        return BACKENDS[backend].draft_model_weights(asked, beside, config, weights)

    assert [chosen("native", None, of) for of in ("int8", "int4", FILE, "bf16")] == ["int4_row"] * 3 + ["bf16"]
    assert [chosen("native", asked, "int8") for asked in ("int4_row", "int4", "f32")] == [
        "int4_row",
        "int4",
        "f32",
    ]
    assert chosen("native", FILE, "int8") == "int8"  # these numbers come from no file
    assert [chosen("cuda", asked, "bf16") for asked in (None, "fp8")] == ["bf16", "fp8"]
    with pytest.raises(ConfigError, match=r"int4_row, int8, bf16, f32, int4, .*auto, not 'int9'.*mean 'int8'"):
        chosen("native", "int9", "int8")
    with pytest.raises(ConfigError, match="no --weights int8"):
        chosen("reference", "int8", "f32")
