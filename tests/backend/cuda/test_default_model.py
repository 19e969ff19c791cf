"""The default model through the twins of `cuda` on cores: the same text with every drafter, and what they keep."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline import drafters
from paceline.bench.prompt_file import BUILTIN, read_prompts
from paceline.core.params import SamplingParams, Speculation
from paceline.core.request_nouns import Request
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from paceline.model.heads.config import read_config
from tests.engine.same_text import Answer, assert_same, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.pass_notes import PassNote
    from paceline.core.request_nouns import Outcome

pytestmark = [pytest.mark.nightly, pytest.mark.default_model]  # minutes: passes in float32

NUM_PROMPTS, NUM_TOKENS, NUM_ROWS = 20, 16, 4
PEAGLE = "peagle"
DRAFTS = ["eagle3:k=4", PEAGLE, "draft-model:k=3", "suffix:k=6", "auto"]
BACKENDS = {"cuda": "cpu", "reference": None}  # name -> device


def shipped_head() -> Path:
    (shipped,) = Path(drafters.__file__ or next(iter(drafters.__path__))).glob("*/eagle3")
    return shipped


@pytest.fixture(scope="module")
def peagle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A P-EAGLE head of the shipped EAGLE-3 head's weights, so that its first guesses are worth something.

    Its later guesses read mask tokens, which these weights never met.
    """
    shipped = shipped_head()
    folder = tmp_path_factory.mktemp("peagle")
    values = json.loads((shipped / "config.json").read_text())
    values |= {"speculators_model_type": PEAGLE, "mask_token_id": 0}
    (folder / "config.json").write_text(json.dumps(values))
    tapped_size = read_config(values, loaded("reference").decoder.config).tapped_size
    tensors = load_file(shipped / "model.safetensors")
    save_file(tensors | {"mask_hidden": np.zeros((1, 1, tapped_size), np.float16)}, folder / "model.safetensors")
    return f"peagle:model={folder},k=4"


def config(backend: str, draft: str) -> EngineConfig:
    return EngineConfig(
        draft=draft,
        backend=backend,
        device=BACKENDS[backend],
        weights="f32",
        threads=1,
        kv_tokens=NUM_ROWS * 512,
        limits=Limits(NUM_ROWS, 512, 64),
    )


@cache
def loaded(backend: str) -> build.Loaded:
    return build.load(config(backend, "off"))


def requests(temperature: float) -> list[Request]:
    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True)
    texts = [prompt.text[:120] for prompt in read_prompts(BUILTIN, NUM_PROMPTS)]
    encode = loaded("cuda").tokenizer.encode
    told = Speculation(details=True)
    return [Request(str(i), tuple(encode(text)), params, seed=i, speculation=told) for i, text in enumerate(texts)]


@cache
def written(backend: str, draft: str, temperature: float) -> tuple[dict[str, Answer], dict[str, list[PassNote]]]:
    """Return answers, and the passes that made them."""
    engine = build.assemble(config(backend, draft), loaded(backend)).engine
    notes: dict[str, list[PassNote]] = {}
    step = engine.step

    def watched() -> list[Outcome]:
        outcomes = step()
        for outcome in outcomes:
            notes.setdefault(outcome.request_id, []).extend(outcome.notes)
        return outcomes

    engine.step = watched  # type: ignore[method-assign]
    answers = run(engine, requests(temperature))
    assert engine.stats().drafter_failures == 0
    return answers, notes


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_texts_are_those_without_drafts(draft: str, temperature: float, peagle: str) -> None:
    spec = peagle if draft == PEAGLE else draft
    assert_same(written("cuda", "off", temperature)[0], written("cuda", spec, temperature)[0])


@pytest.mark.parametrize("draft", ["eagle3:k=4", PEAGLE, "draft-model:k=3"])
def test_drafts_kept_are_those_of_the_reference(draft: str, peagle: str) -> None:
    """In float32, pass by pass; a text that differs is a near-tie of the target."""
    spec = peagle if draft == PEAGLE else draft
    ours, our_notes = written("cuda", spec, 0.0)
    theirs, their_notes = written("reference", spec, 0.0)
    same = [name for name in ours if ours[name].token_ids == theirs[name].token_ids]
    assert len(same) >= NUM_PROMPTS - 1
    kept = [num for name in same for num in drafts_kept(our_notes[name], their_notes[name])]
    assert sum(kept) > NUM_PROMPTS / 2, "the drafter is worth little"


def drafts_kept(ours: list[PassNote], theirs: list[PassNote]) -> Iterator[int]:
    """Yield what each decode pass of an answer kept; chunks of its prefill may be others.

    A late loop drafts deeper near an answer's end, as it does not know yet how few tokens are left, and it may
    write a request token a step later. The target then says other things behind refused drafts, which hints the
    passes that follow. So an answer is compared up to there.
    """
    decoded = ([note for note in notes if not note.prefill] for notes in (ours, theirs))
    for a, b in zip(*decoded, strict=True):
        common = min(len(a.draft_ids), len(b.draft_ids))
        assert a.token_ids == b.token_ids
        assert min(a.num_accepted, common) == min(b.num_accepted, common)
        yield min(a.num_accepted, common)
        differ = next((both for both in zip(a.draft_ids, b.draft_ids, strict=False) if both[0] != both[1]), None)
        if differ is not None:
            assert not draft_vocabulary().issuperset(differ), "a draft differs and neither is a request token"
        if differ is not None or len(a.draft_ids) != len(b.draft_ids):
            return


@cache
def draft_vocabulary() -> frozenset[int]:
    """Tokens that the shipped head writes by itself."""
    offsets = load_file(shipped_head() / "model.safetensors")["d2t"]
    return frozenset((np.arange(len(offsets)) + offsets).tolist())
