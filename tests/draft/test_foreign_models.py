"""A real pair with two vocabularies: Gemma 3 270M as target, the default model's layers as drafter."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.request_table import Limits
from paceline.model.files.pull import PACKAGED, cache_folder
from tests.engine.same_text import run

MODEL = "gemma3-270m"
PROMPTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The capital of France is Paris. The capital of Italy is",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.default_model,
    pytest.mark.skipif(
        not (cache_folder() / "models" / PACKAGED[MODEL].file).is_file(),
        reason=f"paceline pull {MODEL} fetches it",
    ),
]


def config(backend: str, draft: str) -> EngineConfig:
    return EngineConfig(
        model=MODEL, draft=draft, backend=backend, threads=1, limits=Limits(2, 256, 64), kv_tokens=1024
    )


@cache
def loaded(backend: str) -> build.Loaded:
    return build.load(config(backend, "off"))


@cache
def drafter(backend: str, name: str, _: str | None) -> build.DraftWeights:
    return build._load_drafter(config(backend, "off"), name)


def engine(backend: str, draft: str) -> Engine:
    return build.assemble(config(backend, draft), loaded(backend), partial(drafter, backend)).engine


def requests(temperature: float) -> list[Request]:
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    encode = loaded("native").tokenizer.encode
    return [Request(str(i), tuple(encode(text)), params, seed=9) for i, text in enumerate(PROMPTS)]


def test_it_is_a_model_that_knows_its_language() -> None:
    answers = run(engine("native", "off"), requests(0.0))
    assert "Rome" in answers["1"].text
    assert "fibonacci(n - 1)" in answers["0"].text.replace("n-1", "n - 1")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocabulary", ["tokens", "strings"])
def test_same_text_and_some_accepted(vocabulary: str, temperature: float) -> None:
    expected = run(engine("native", "off"), requests(temperature))
    drafting = engine("native", f"draft-model:model=default,vocabulary={vocabulary},k=3")
    assert run(drafting, requests(temperature)) == expected
    stats = drafting.stats()
    assert stats.drafter_failures == 0
    assert sum(stats.drafters["draft-model"].accepted_at) > (4 if temperature == 0.0 else 1)


@pytest.mark.parametrize("vocabulary", ["tokens", "strings"])
def test_same_text_on_the_reference(vocabulary: str) -> None:
    few = [replace(r, params=replace(r.params, max_tokens=8)) for r in requests(1.0)]
    expected = run(engine("reference", "off"), few)
    drafting = engine("reference", f"draft-model:model=default,layers=4,vocabulary={vocabulary},k=2")
    assert run(drafting, few) == expected
    assert drafting.stats().drafter_failures == 0
