"""A bench for promise 1: workloads on a tiny float64 target, run with any drafter and any engine settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from paceline.backend.cuda import load as cuda
from paceline.backend.device import Device
from paceline.backend.native import load as native
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.registry import BACKENDS
from paceline.core.nouns import Batch, Draft, Plan, RowDraft, RowPlan, Verdict
from paceline.core.params import Grammar, SamplingParams
from paceline.core.request_nouns import Outcome, Request, TokenLogprobs
from paceline.draft.drafter import DraftWeights, Vocabulary
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.request_table import Limits
from paceline.engine.stats import Stats
from tests.draft.foreign import TOKENIZERS, foreign_weights
from tests.tiny import tiny_config, tiny_tokenizer, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.seam import Decoder
    from paceline.control.policy import StepView
    from paceline.control.protocols import StepTimes
    from paceline.model.config import ModelConfig

VOCAB = 320
BACKEND_OF = {"f64": "reference", "cuda": "cuda"}
ON_CORES = Device(torch_name="cpu")
STAIRCASE = str(Path(__file__).with_name("staircase.json"))  # costs of suffix and draft-model, up in steps
KV_TYPES = {
    "f64": "f64",
    "cuda": "f64",
    "f32": "f32",
    "bf16": "f16",
    "int8": "i16",
    "int4": "i8",
}  # beside each type of weights
SHARP = 2.3  # so that neither drafter is always right or always wrong
DRAFTER_NOISE = 0.06  # of the draft model's weights against the target's
MAX_LEN = 256


def make_decoder(config: ModelConfig, weights: Mapping[str, torch.Tensor], types: str) -> Decoder:
    """`f64` is the reference backend, `cuda` that backend on cores, one step late; any other type is native."""
    if types == "f64":
        return ReferenceDecoder(config, weights, torch.float64)
    if types == "cuda":
        return cuda.load_decoder(config, weights, "f64", "f64", None, ON_CORES)
    return native.load_decoder(config, weights, types, KV_TYPES[types], threads=2 if types == "int4" else 1)


@cache
def target(types: str = "f64") -> build.Loaded:
    config = tiny_config(vocab_size=VOCAB, num_layers=3, eos_ids=(VOCAB - 1,))
    weights = tiny_weights(config, seed=4, embed_scale=SHARP)
    decoder, tokenizer = make_decoder(config, weights, types), tiny_tokenizer(VOCAB)
    return build.Loaded("tiny", decoder, tokenizer, None, "tiny", content="tiny")


@cache
def draft_weights(name: str, _: str | None = None, *, types: str = "f64") -> DraftWeights:
    """`noisy`: the target's weights disturbed. `same`: the target itself. Else: with another vocabulary."""
    loaded = target(types)
    config = loaded.decoder.config
    weights = tiny_weights(config, seed=4, embed_scale=SHARP)
    if name in TOKENIZERS:
        weights, vocabulary = foreign_weights(name, weights)
        own = replace(config, vocab_size=vocabulary.size, eos_ids=())
        return narrowable(make_decoder(own, weights, types), vocabulary, types)
    if name == "noisy":
        other = tiny_weights(config, seed=5, embed_scale=SHARP)
        weights = {n: w + DRAFTER_NOISE * other[n] for n, w in weights.items()}
    return narrowable(make_decoder(config, weights, types), Vocabulary(name, loaded.tokenizer, VOCAB), types)


def narrowable(decoder: Decoder, vocabulary: Vocabulary, types: str) -> DraftWeights:
    """A drafter's model that can write some of its tokens, where its backend has that."""
    spec = BACKENDS[BACKEND_OF.get(types, "native")]
    return DraftWeights(decoder, vocabulary, partial(spec.narrow, decoder) if spec.narrower else None)


@dataclass(frozen=True)
class Settings:
    """What promise 1 says must not matter."""

    num_rows: int = 16
    num_pages: int = 16 * 16
    prefill_tokens: int = 512
    prefix_cache: bool = False


PLAIN = Settings()


class RestlessK:
    """A controller that changes its mind: any K for any row in any step, trimmed anyhow before verification."""

    def wants_preview(self, num_rows: int, unavailable: frozenset[int]) -> bool:
        return False

    def reuse_plan(self, num_rows: int) -> bool:
        return False

    @property
    def second_group(self) -> RestlessK:
        return self

    def __init__(self, drafter: str, k: int, seed: int) -> None:
        self._drafter, self._k, self._random = drafter, k, Random(seed)

    def admit(self, row: int, valid_lens: Mapping[str, int] | None = None, *, rebirth: bool = False) -> None:
        pass

    def forget_texts(self, drafter: str) -> None:
        pass

    def plan(self, view: StepView) -> Plan:
        rows = {row: RowPlan(self._drafter, self._random.randint(0, self._k)) for row in view.rows.tolist()}
        budget = self._random.randint(0, 3 * len(rows)) if self._random.random() < 0.5 else None
        return Plan(rows, budget=budget)

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> tuple[()]:
        return ()

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        return Draft(tuple(self._trim_row(row) for row in draft.rows))

    def _trim_row(self, row: RowDraft) -> RowDraft:
        kept = self._random.randint(0, len(row)) if self._random.random() < 0.2 else len(row)
        probs = None if row.probs is None else row.probs[:kept]
        return RowDraft(row.token_ids[:kept], row.drafter, probs=probs)


def make_engine(
    draft: str, settings: Settings, law: str = "coupled", types: str = "f64", **changes: Any
) -> Engine:
    """`changes` are further fields of `EngineConfig`."""
    limits = Limits(settings.num_rows, MAX_LEN, settings.prefill_tokens)
    config = EngineConfig(
        draft=draft,
        law=law,
        backend=BACKEND_OF.get(types, "native"),
        device="cpu" if types == "cuda" else None,
        weights="f64" if types == "cuda" else types,
        kv=KV_TYPES[types],
        profile=changes.pop("profile", STAIRCASE if draft.startswith("auto") else None),
        kv_tokens=settings.num_pages * 16,
        prefix_cache=settings.prefix_cache,
        limits=limits,
        **changes,
    )
    return build.assemble(config, target(types), partial(draft_weights, types=types)).engine


@dataclass
class Answer:
    """All that promise 1 covers."""

    start: int = 0  # tokens before these, told with the request
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    ending: tuple[object, ...] = ()

    def take(self, outcome: Outcome) -> None:
        assert not self.ending, "told of an answer that has ended"
        assert outcome.start == self.start + len(self.token_ids)
        if outcome.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "told of a prompt's scores twice"
            assert not self.token_ids, "they come with the first outcome"
            self.prompt_logprobs = outcome.prompt_logprobs
        self.token_ids += outcome.token_ids
        self.text += outcome.text
        self.logprobs += outcome.logprobs or ()
        if outcome.finish_reason is not None:
            assert outcome.figures is not None
            assert outcome.figures.completion_tokens == self.start + len(self.token_ids)
            self.ending = (
                outcome.finish_reason,
                outcome.stop_reason,
                outcome.figures.completion_tokens,
                outcome.figures.seed,
            )


def run(engine: Engine, requests: list[Request], stagger: int = 0) -> dict[str, Answer]:
    """Serve the requests, one arriving every `stagger` steps, checking every invariant after every step."""
    answers = {r.request_id: Answer(len(r.told)) for r in requests}
    waiting, steps = list(requests), 0
    while waiting or engine.has_work:
        while waiting and (stagger == 0 or steps % stagger == 0):
            engine.add(waiting.pop(0))
            if stagger:
                break
        for outcome in engine.step():
            answers[outcome.request_id].take(outcome)
        engine.check()
        steps += 1
    assert engine.scheduler.pool.num_held == 0
    return answers


_PLAIN_ANSWERS: dict[tuple[str, str], dict[str, Answer]] = {}  # by types and requests


def plain_answers(requests: list[Request], types: str = "f64") -> dict[str, Answer]:
    """The requests' answers without drafts. They are written once: suites share workloads."""
    key = types, repr(requests)
    if key not in _PLAIN_ANSWERS:
        _PLAIN_ANSWERS[key] = run(make_engine("off", PLAIN, types=types), requests)
    return dict(_PLAIN_ANSWERS[key])


def assert_same(expected: dict[str, Answer], got: dict[str, Answer]) -> None:
    for name, answer in expected.items():
        assert got[name].token_ids == answer.token_ids, name
        assert got[name].text == answer.text, name
        assert got[name].ending == answer.ending, name
        assert (got[name].prompt_logprobs is None) == (answer.prompt_logprobs is None), name
        pairs = [*zip(got[name].logprobs, answer.logprobs, strict=True)]
        pairs += zip(got[name].prompt_logprobs or (), answer.prompt_logprobs or (), strict=True)
        for ours, theirs in pairs:
            assert ours.token_id == theirs.token_id
            assert ours.top_ids == theirs.top_ids
            assert abs(ours.logprob - theirs.logprob) < 1e-9
            assert all(abs(a - b) < 1e-9 for a, b in zip(ours.top_logprobs, theirs.top_logprobs, strict=True))


# Workloads ---------------------------------------------------------------------------------------

STEM = tuple(range(40, 75))  # prompts share it, and part at every place of a page

_words = st.lists(st.integers(32, 60), min_size=1, max_size=12)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw a prompt. Some repeat themselves, some share a stem, cut anywhere or at a page border."""
    word = tuple(draw(_words))
    stem = STEM[: draw(st.sampled_from([0, 0, 15, 16, 17, 32, 33]))]
    return stem + word * draw(st.integers(1, 3)) + tuple(draw(_words))


GRAMMARS = (
    Grammar.regex("(the (in|on)er? )*[a-f]{2,30}"),
    Grammar.choice(["the inner one", "the other", "in"]),
    Grammar.json_schema(
        {
            "type": "object",
            "properties": {
                "the": {"type": "string", "maxLength": 6},
                "on": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["the", "on"],
            "additionalProperties": False,
        }
    ),
)


@st.composite
def sampling(draw: st.DrawFn, grammars: bool = True) -> SamplingParams:
    grammar = draw(st.sampled_from([None] * 6 + [*GRAMMARS])) if grammars else None
    max_tokens = draw(st.sampled_from([1, 2, 7, 30, 60, 60]))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 0, 1, 5, 40])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.0, 1.2])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.0, 0.3, -0.2])),
        logit_bias=draw(st.sampled_from([{}, {}, {}, {VOCAB - 1: 4.0}, {5: -100.0, 40: 3.0}])),
        stop_token_ids=tuple(draw(st.sampled_from([(), (), (41,), (100, 101)]))),
        ignore_eos=draw(st.booleans()) and grammar is None,
        grammar=grammar,
        min_tokens=draw(st.sampled_from([0, 0, 3])) if max_tokens > 3 else 0,
        max_tokens=max_tokens,
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        n=draw(st.sampled_from([1, 1, 1, 3])),
    )


@st.composite
def workloads(draw: st.DrawFn, grammars: bool = True) -> list[Request]:
    """1 to 16 requests with parameters of all kinds."""
    requests: list[Request] = []
    for index in range(draw(st.integers(1, 12))):
        params, prompt, seed = draw(sampling(grammars)), draw(prompts()), draw(st.integers(0, 2**63 - 1))
        choices = range(params.n)
        requests += [Request(f"{index}.{c}", prompt, params, seed=seed, choice=c) for c in choices]
    return requests[:16]


def with_stops(requests: list[Request], plain: dict[str, Answer], picks: list[int]) -> list[Request]:
    """Give every other request stop strings that its plain answer contains, whole tokens or not."""
    stopped = []
    for request, pick in zip(requests, picks, strict=False):
        text = plain[request.request_id].text
        if pick % 2 and len(text) > 3:
            start, length = pick % (len(text) - 1), 1 + pick // 7 % 4
            stops = (text[start : start + length], "never written")
            params = replace(request.params, stop=stops, include_stop=pick % 3 == 0)
            request = replace(request, params=params)  # noqa: PLW2901
        stopped.append(request)
    return stopped


@st.composite
def settings_(draw: st.DrawFn, hard: bool = False) -> Settings:
    """Batch sizes, prefill chunks from one token to whole, few pages to force preemption, prefix hits.

    hard: many rows on few pages, with the prefix cache.
    """
    return Settings(
        num_rows=draw(st.sampled_from([5, 16] if hard else [1, 2, 3, 5, 16, 16, 16])),
        num_pages=draw(st.sampled_from([10, 12] if hard else [10, 10, 12, 256])),
        prefill_tokens=draw(st.sampled_from([1, 3, 16, 64, 512])),
        prefix_cache=hard or draw(st.booleans()),
    )


@dataclass
class Tally:
    """What a suite has covered."""

    cases: int = 0
    stats: Stats = field(default_factory=Stats)
    endings: set[object] = field(default_factory=set)
    num_stopped: int = 0  # answers that ended before their limit
    verified_at: list[int] = field(default_factory=lambda: [0] * 8)
    accepted_at: list[int] = field(default_factory=lambda: [0] * 8)
    preemptions: int = 0
    cached_tokens: int = 0
    ks: set[int] = field(default_factory=set)  # that were verified

    def add(self, engine: Engine, answers: dict[str, Answer]) -> None:
        stats = engine.stats()
        self.cases += len(answers)
        self.preemptions += stats.preemptions
        self.cached_tokens += stats.cached_tokens
        self.stats.drafter_failures += stats.drafter_failures
        self.stats.untapped_tokens += stats.untapped_tokens
        self.stats.drafters |= stats.drafters
        self.ks |= {k for k, count in enumerate(stats.k_histogram) if count}
        self.endings |= {a.ending[0] for a in answers.values()}
        self.num_stopped += sum(a.ending[0] == "stop" for a in answers.values())
        for counts in stats.drafters.values():
            for i, count in enumerate(counts.verified_at):
                self.verified_at[i] += count
            for i, count in enumerate(counts.accepted_at):
                self.accepted_at[i] += count

    @property
    def acceptance(self) -> float:
        return sum(self.accepted_at) / max(1, sum(self.verified_at))

    @property
    def times_accepted(self) -> list[int]:
        """How often exactly 0, 1, ... 8 drafts were accepted of at least one."""
        at_least = [self.verified_at[0], *self.accepted_at, 0]
        return [a - b for a, b in pairwise(at_least)]
