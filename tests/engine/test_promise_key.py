"""The promise key: equal where texts are, another where anything that they depend on is."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from paceline.core.promise import Promise, fingerprint
from paceline.engine.assembly import build, promise_key
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.promise_key import language_digest, self_test
from paceline.model.template_source import TemplateSource
from paceline.model.tokenizer import Tokenizer
from tests.engine.same_text import (
    PLAIN,
    SHARP,
    VOCAB,
    Settings,
    make_decoder,
    make_engine,
    target,
)
from tests.tiny import tiny_config, tiny_tokenizer, tiny_weights


@pytest.mark.parametrize("types", ["int8", "int4", "bf16"])
def test_the_self_test_sees_neither_drafters_nor_chunks_nor_rows(types: str) -> None:
    expected = self_test(make_engine("off", PLAIN, types=types))
    for draft, changed in (
        ("draft-model:model=noisy,k=3", PLAIN),
        ("ngram", Settings(num_rows=2, num_pages=12, prefill_tokens=16, prefix_cache=True)),
    ):
        engine = make_engine(draft, changed, types=types)
        assert self_test(engine) == self_test(engine) == expected
        assert not engine.has_work
        assert engine.stats().steps == 0
        engine.check()


def test_one_weight_that_is_off_is_seen() -> None:
    config = tiny_config(vocab_size=VOCAB, num_layers=3, eos_ids=(VOCAB - 1,))
    weights = {name: np.array(w) for name, w in tiny_weights(config, seed=4, embed_scale=SHARP).items()}
    loaded = target("f64")
    sums = []
    for factor in (1.0, 1.0 + 1e-9):
        name = next(n for n in weights if n.endswith("mlp_down"))
        weights[name].flat[3] *= factor
        other = replace(loaded, decoder=make_decoder(config, weights, "f64"))  # type: ignore[arg-type]
        built = build.assemble(make_config(), other)
        sums.append(self_test(built.engine))
    assert sums[0] == self_test(make_engine("off", PLAIN))
    assert sums[0] != sums[1]


def make_config() -> EngineConfig:
    return EngineConfig(draft="off", backend="reference", weights="f64", kv="f64", kv_tokens=512)


def test_a_large_model_reads_less(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("off", PLAIN, types="int8")
    whole = self_test(engine)
    monkeypatch.setattr(promise_key, "MOST_WORK", 1)
    assert self_test(engine) != whole, "one token, not none"


def test_the_key_depends_on_every_fact() -> None:
    plain = Promise()
    keys = {plain.key(""), plain.key("x")}
    for one in fields(Promise):
        keys |= {replace(plain, **{one.name: "x"}).key("")}
    assert len(keys) == 2 + len(fields(Promise))
    assert fingerprint(plain.key("")) == f"fp_{plain.key('')[:16]}"
    assert fingerprint("") is None


def test_the_digest_of_a_language_has_tokenizer_end_tokens_special_tokens_and_what_reads_grammars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw, template = tiny_tokenizer().raw, TemplateSource("{{ bos_token }}", {"bos_token": "<s>"})
    usual = Tokenizer(raw, eos_ids=(319,), digest="one")
    others = [
        Tokenizer(raw, eos_ids=(319,), digest="another"),
        Tokenizer(raw, eos_ids=(319, 7), digest="one"),
        Tokenizer(raw, eos_ids=(319,), bos_id=9, digest="one"),
    ]
    digests = {language_digest(one, template) for one in (usual, *others)}
    digests |= {language_digest(usual, None), language_digest(usual, TemplateSource(template.text, {}))}
    assert len(digests) == 6
    assert language_digest(Tokenizer(raw, eos_ids=(319,), digest="one"), template) in digests
    monkeypatch.setattr(promise_key, "version", lambda _: "another")
    assert language_digest(usual, template) not in digests
