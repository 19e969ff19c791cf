"""Promises of the drafters' seam, asked of every drafter in the registry on every backend, late and opaque too.

A new drafter without files of its own, and a new kind of head that training knows, need only their registry line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from paceline.backend.registry import BACKENDS
from paceline.backend.target import Deferred
from paceline.core.errors import ConfigError
from paceline.core.nouns import BROKEN, UNCHOSEN
from paceline.core.params import SamplingParams
from paceline.draft.drafter import DraftWeights, Vocabulary
from paceline.draft.registry import DRAFTERS, KeepsForPages, parse_spec
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from tests.backend.backends import ALL_BACKENDS, TEST_BACKENDS
from tests.draft.foreign import TOKENIZERS, foreign_weights
from tests.draft.heads import CORRECTED, WHOLE, drafter_of, trained_head, trained_mtp
from tests.draft.test_cut_model import write_cut_model
from tests.engine.same_text import DRAFTER_NOISE, MAX_LEN, SHARP, VOCAB, Answer, Request, assert_same, run, target
from tests.tiny import tiny_config, tiny_tokenizer, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.seam import CorrectRequest, PassRequest, PassResult, Pending
    from paceline.core.nouns import Batch, Draft, Plan
    from paceline.draft.drafter import Drafter
    from paceline.engine.engine import Engine

CONFIG = tiny_config(vocab_size=VOCAB, num_layers=3, eos_ids=(VOCAB - 1,))
K = 4

# Variants of a drafter, by its name in the registry; a head's kinds; else the name alone.
VARIANTS = {
    "suffix": ("suffix", "suffix:shared=2000"),
    "ngram": ("ngram:min=1,max=4",),
    "oracle": ("oracle:rates=0.8+0.6,file=RECORDED",),
    "draft-model": (
        "draft-model:layers=2",
        "draft-model:model=noisy",
        "draft-model:model=noisy,max_len=64",
        "draft-model:model=noisy,tokens=90",
        "draft-model:model=renumbered",
        "draft-model:model=other,vocabulary=tokens",
        "draft-model:model=other,vocabulary=strings",
        "draft-model:model=CUT",
    ),
    drafter_of(CORRECTED): ("block:model=HEAD", "block:model=CORRECTED", "block:model=WHOLE"),
}
KINDS = {"CORRECTED": CORRECTED, "WHOLE": WHOLE}  # of heads, by the words of a spec
HEADS = ("eagle", "eagle3", "peagle")


def variants(name: str) -> tuple[str, ...]:
    return VARIANTS.get(name, (f"{name}:model=HEAD",) if name in HEADS else (name,))


SPECS = [spec for name in DRAFTERS for spec in variants(name)]


@cache
def files(spec: str) -> str:
    """A spec with folders in place of its words in capitals."""
    if spec.endswith("CUT"):
        return spec.replace("CUT", str(write_cut_model(Path(mkdtemp(prefix="cut-")))))
    if spec.endswith(("HEAD", *KINDS)):
        kind = KINDS.get(spec.rpartition("=")[2], spec.partition(":")[0])
        return f"{spec.rpartition('=')[0]}={trained_head(kind, target().decoder)}"  # type: ignore[arg-type]
    return spec


def types_of(backend: str) -> tuple[str, str]:
    """Types in which the backend promises the same text."""
    spec = ALL_BACKENDS[backend]
    weights = "f64" if "f64" in spec.weight_types else spec.weight_type(None)
    return weights, spec.kv_type(None, weights)


def _decoder(backend: str, config: Any, weights: Mapping[str, Any]) -> Any:
    return ALL_BACKENDS[backend].load()(config, weights, *types_of(backend), 1)


@cache
def loaded(backend: str) -> build.Loaded:
    weights = tiny_weights(CONFIG, seed=4, embed_scale=SHARP)
    head_within = trained_mtp(target().decoder)  # type: ignore[arg-type]
    return build.Loaded(
        "tiny", _decoder(backend, CONFIG, weights), tiny_tokenizer(VOCAB), None, "tiny", head_within=head_within
    )


@cache
def own_weights(backend: str, name: str, _: str | None) -> DraftWeights:
    weights = tiny_weights(CONFIG, seed=4, embed_scale=SHARP)
    if name in TOKENIZERS:
        weights, vocabulary = foreign_weights(name, weights)
        config = replace(CONFIG, vocab_size=vocabulary.size, eos_ids=())
        return DraftWeights(_decoder(backend, config, weights), vocabulary)
    other = tiny_weights(CONFIG, seed=5, embed_scale=SHARP)
    weights = {n: w + DRAFTER_NOISE * other[n] for n, w in weights.items()}
    vocabulary = Vocabulary(name, loaded(backend).tokenizer, VOCAB)
    decoder, spec = _decoder(backend, CONFIG, weights), ALL_BACKENDS[backend]
    return DraftWeights(decoder, vocabulary, partial(spec.narrow, decoder) if spec.narrower else None)


def engine_on(backend: str, draft: str, num_pages: int = 64) -> Engine:
    weights, kv = types_of(backend)
    config = EngineConfig(
        draft=draft,
        backend=backend,
        weights=weights,
        kv=kv,
        kv_tokens=num_pages * 16,
        prefix_cache=True,
        limits=Limits(6, MAX_LEN, 48),
    )
    return build.assemble(config, loaded(backend), partial(own_weights, backend)).engine


def requests() -> list[Request]:
    """Greedy, drawn, filtered and penalised texts that repeat themselves and share a stem."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=25),
        SamplingParams(temperature=1.0, top_p=0.9, max_tokens=20),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=20),
    ]
    return [
        Request(str(i), (*range(40, 60), *(40 + i, 50, 60) * 4), params[i % 4], seed=i, salt="s") for i in range(8)
    ]


@cache
def plain(backend: str) -> dict[str, Answer]:
    return run(engine_on(backend, "off"), requests())


@cache
def recorded(backend: str) -> str:
    """The file of what the backend writes without drafts."""
    file = Path(mkdtemp(prefix="recorded-")) / "plain.jsonl"
    lines = [{"draft": "off", "token_ids": answer.token_ids} for answer in plain(backend).values()]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


@pytest.fixture(autouse=True)
def _known_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, spec in TEST_BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, spec)


def built(backend: str, spec: str) -> tuple[Engine, Drafter]:
    """An engine with the drafter, unless rows of this backend are too late for it."""
    draft = files(spec)
    if draft.endswith("RECORDED"):
        draft = draft.replace("RECORDED", recorded(backend))
    asked = f"{draft},k={K}" if ":" in draft else f"{draft}:k={K}"
    try:
        engine = engine_on(backend, asked)
    except ConfigError as error:
        assert any(reason in str(error) for reason in ("knows its rows at once", "leave out draft-model:tokens"))
        pytest.skip(str(error))
    (drafter,), config = engine.drafting.drafters.values(), parse_spec(asked)
    kept = isinstance(config, KeepsForPages) and config.keeps_for_pages
    assert kept or not drafter.needs.stores, "nothing leaves memory for its stores"
    return engine, drafter


def checked(drafter: Drafter) -> list[int]:
    """Check every draft against its batch and its plan; return a list that gets their lengths."""
    propose, lengths = drafter.propose, list[int]()

    def watched(batch: Batch, plan: Plan) -> Draft:
        draft = propose(batch, plan)
        draft.check(batch)
        for bound, row in zip(batch.rows, draft.rows, strict=True):
            assert len(row) <= plan.k(bound.row)
            if row.is_bound:  # the device makes these drafts
                assert drafter.needs.late
                assert set(row.token_ids) == {UNCHOSEN}
            else:
                assert all(0 <= token_id < VOCAB for token_id in row.token_ids)
            assert not len(row) or row.drafter == drafter.name
            lengths.append(len(row))
        return draft

    drafter.propose = watched  # type: ignore[method-assign]
    return lengths


every_pair = pytest.mark.parametrize(
    ("backend", "spec"), [(backend, spec) for backend in ALL_BACKENDS for spec in SPECS]
)


def in_turn(names: list[str]) -> pytest.MarkDecorator:
    """Every drafter on one of some backends, each of which has some drafters; all other pairs nightly."""
    pairs = list[Any]()
    for index, spec in enumerate(SPECS):
        for backend in ALL_BACKENDS:
            chosen = backend == names[index % len(names)]
            pairs.append(pytest.param(backend, spec, marks=() if chosen else pytest.mark.nightly))
    return pytest.mark.parametrize(("backend", "spec"), pairs)


def test_every_drafter_of_the_registry_is_asked() -> None:
    assert {files(spec).partition(":")[0] for spec in SPECS} == set(DRAFTERS)
    assert all(parse_spec(files(spec)) is not None for spec in SPECS)


@every_pair
def test_drafts_keep_their_bounds_and_the_text_is_the_same(backend: str, spec: str) -> None:
    """Also with few pages, when requests are preempted, and once more after the drafter forgot."""
    engine, drafter = built(backend, spec)
    lengths = checked(drafter)
    assert_same(plain(backend), run(engine, requests()))
    engine.forget()
    assert_same(plain(backend), run(engine, requests(), stagger=2))
    assert engine.stats().drafter_failures == 0
    assert drafter.needs.grammar_only or sum(lengths) > 40  # no row here has a grammar
    assert set(drafter.valid_lens(0) if drafter.needs.stores else ()) == set(drafter.needs.stores)


@in_turn([*ALL_BACKENDS])
def test_a_drafter_that_fails_costs_drafts_only(backend: str, spec: str) -> None:
    """Before it has done anything, or after: what it holds of its rows stays of use."""
    engine, drafter = built(backend, spec)
    propose, random = drafter.propose, Random(3)

    def failing(batch: Batch, plan: Plan) -> Draft:
        if random.random() < 0.2:
            raise RuntimeError("not now")
        draft = propose(batch, plan)
        if random.random() < 0.2:
            raise RuntimeError("too late")
        return draft

    drafter.propose = failing  # type: ignore[method-assign]
    assert_same(plain(backend), run(engine, requests()))
    assert engine.stats().drafter_failures > 0


class NoNumbers:
    """An executor whose logits are none."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, request: PassRequest) -> Pending:
        pending = self._inner.launch(request)
        return Deferred(lambda: broken(pending.wait()))

    def correct(self, request: CorrectRequest) -> PassResult:
        return broken(self._inner.correct(request))


def broken(result: PassResult) -> PassResult:
    token_ids = np.where(result.token_ids == UNCHOSEN, UNCHOSEN, BROKEN)
    logits = None if result.logits is None else result.logits * np.nan
    return replace(result, token_ids=token_ids, logits=logits)


@in_turn([name for name in ALL_BACKENDS if name != "cuda"])  # whose drafters have no passes of their own here
def test_logits_that_are_no_numbers_draft_nothing(backend: str, spec: str) -> None:
    engine, drafter = built(backend, spec)
    executors = [name for name, part in vars(drafter).items() if hasattr(part, "capabilities")]
    if not executors:
        pytest.skip("it has no passes")
    for name in executors:
        setattr(drafter, name, NoNumbers(getattr(drafter, name)))
    assert_same(plain(backend), run(engine, requests()))
    assert not engine.stats().drafters, "nothing was verified"
