"""Drafter specs, and drafters that do not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from paceline.bench.scenarios.engine_pool import drafter_names, fixed_policies
from paceline.core.errors import ConfigError, ModelNotFound
from paceline.draft import shipped
from paceline.draft.drafter import Vocabulary
from paceline.draft.lookup.ngram import NgramConfig
from paceline.draft.model.draft_model import DraftModelConfig
from paceline.draft.model.id_map import difference
from paceline.draft.registry import parse_drafters, parse_spec
from paceline.engine.assembly.build import load
from paceline.engine.assembly.config import EngineConfig
from paceline.model.files.catalogue import BETTER, PACKAGED
from paceline.model.files.pull import kept_file
from tests.engine.same_text import PLAIN, make_engine
from tests.tiny import tiny_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def test_specs() -> None:
    assert parse_spec("off") is None
    assert parse_spec("ngram") == NgramConfig()
    assert parse_spec("ngram:k=2,min=3,max=5") == NgramConfig(k=2, min=3, max=5)
    assert parse_spec("draft-model:layers=7,k=3") == DraftModelConfig(k=3, layers=7)
    assert parse_spec("draft-model:model=some/where") == DraftModelConfig(model="some/where")
    assert parse_spec("draft-model") == DraftModelConfig(k=4)
    both = "draft-model:model=x,layers=2,vocabulary=strings"
    assert parse_spec(both) == DraftModelConfig(model="x", layers=2, vocabulary="strings")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ngarm:k=4", "did you mean 'ngram'"),
        ("ngram:kk=4", "did you mean 'k'"),
        ("ngram:k=four", "must be int"),
        ("ngram:k=0", "between 1 and 16"),
        ("ngram:k=99999999999999999999", "between 1 and 16"),
        ("ngram:k", "write k=VALUE"),
        ("ngram:min=9,max=3", "between 1 and 3"),
        ("off:k=1", "no options"),
        ("eagle", "wants model=FOLDER"),
        ("eagle:k=17,model=x", "between 1 and 16"),
        ("eagle:model=x,vocabulary=few", "must be int"),
        ("draft-model:model=x,vocabulary=letters", "tokens, strings"),
        ("draft-model:layers=2,vocabulary=tokens", "goes with model=PATH"),
    ],
)
def test_bad_specs_say_what_to_do(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec(spec)


def test_layers_beyond_the_target_are_refused() -> None:
    with pytest.raises(ConfigError, match="between 1 and 2"):
        make_engine("draft-model:layers=3", PLAIN)


def test_padding_may_differ_but_not_the_vocabulary() -> None:
    target = Vocabulary("target", tiny_tokenizer(320), 320)
    assert difference(target, Vocabulary("padded", tiny_tokenizer(320), 384)) is None
    other = Vocabulary("other", tiny_tokenizer(400), 400)
    assert difference(target, other) == "their tokenizers know 400 and 320 tokens"


def test_auto_has_the_head_that_ships_for_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    (tmp_path / "this-target" / "eagle3").mkdir(parents=True)

    def names(spec: str, fingerprint: str) -> list[str]:
        return [config.name for config in parse_drafters(spec, fingerprint).configs]

    assert names("auto", "this-target") == ["suffix", "grammar", "eagle3"]
    assert names("auto", "another") == names("auto", "") == ["suffix", "grammar"]
    assert names("auto:ngram", "this-target") == ["ngram"]


def test_auto_drafts_with_the_catalogues_model_once_it_is_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    target = PACKAGED[BETTER]
    assert "draft-model" not in {c.name for c in parse_drafters("auto", target.fingerprint).configs}
    kept = kept_file(PACKAGED[target.draft])
    kept.parent.mkdir()
    kept.write_bytes(b"GGUF")
    (found,) = [c for c in parse_drafters("auto", target.fingerprint).configs if c.name == "draft-model"]
    assert found.model == target.draft
    seen = SimpleNamespace(fingerprint=target.fingerprint, head_within=None)
    assert fixed_policies(drafter_names(None, seen), (2,))[-1] == f"draft-model:model={target.draft},k=2"
    assert "grammar" not in drafter_names(None, seen)  # the prompts of a comparison have no grammars
    assert "draft-model" not in {c.name for c in parse_drafters("auto:ngram", target.fingerprint).configs}


def test_a_drafter_that_is_not_there_is_told_before_the_target_is_read(tmp_path):
    config = EngineConfig(model="shape:num_layers=1,hidden_size=64", draft="eagle3:model=/not/there,k=4")
    seen = []
    with pytest.raises(ModelNotFound, match="/not/there"):
        load(config, lambda *progress: seen.append(progress))
    assert seen == []
