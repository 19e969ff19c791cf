"""One run in this process: the prompts through an engine, a fixed number of requests in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.bench.measure import Answer
from paceline.core.errors import PacelineError
from paceline.core.interrupts import uninterrupted
from paceline.core.nouns import Request
from paceline.core.params import MAX_SEED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.bench.prompts import Prompt
    from paceline.core.nouns import Outcome
    from paceline.core.params import SamplingParams
    from paceline.engine.engine import Engine
    from paceline.serve.prompts import Prompts


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A prompt and the request that asks it. Every drafter and every repeat asks with the same seed."""

    prompt: Prompt
    request: Request


@dataclass(slots=True, eq=False)
class _Open:
    """A request in flight."""

    question: Question
    start_s: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, float]] = field(default_factory=list)


def questions(prompts: Sequence[Prompt], encode: Prompts, params: SamplingParams, seed: int) -> list[Question]:
    """Return the requests that ask the prompts, each with a seed of its own. Raises `RequestError`."""
    return [
        Question(p, Request(str(index), _ids(p, encode), params, (seed + index) & MAX_SEED))
        for index, p in enumerate(prompts)
    ]


def _ids(prompt: Prompt, encode: Prompts) -> tuple[int, ...]:
    """Return a prompt's token ids: through the chat template, or as plain text if the model has none."""
    if encode.template is None:
        return encode.of_text(prompt.text)
    return encode.of_messages([{"role": "user", "content": prompt.text}])


def ask(
    engine: Engine,
    asked: Sequence[Question],
    concurrency: int,
    tell: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Ask every question with `concurrency` in flight, and return the answers in the order of the questions.

    Raises `PacelineError` if a request fails. The engine is then empty again, and also after Ctrl-C.
    """
    waiting, inflight, answers = deque(asked), dict[str, _Open](), dict[str, Answer]()
    whole = True  # a step that raised has left rows half-way; such an engine never gets empty
    try:
        with uninterrupted() as look_up:
            while waiting or inflight:
                while waiting and len(inflight) < concurrency:
                    question = waiting.popleft()
                    engine.add(question.request)
                    inflight[question.request.request_id] = _Open(question, perf_counter())
                whole = False
                outcomes, now_s = engine.step(), perf_counter()
                whole = True
                for outcome in outcomes:
                    _take(outcome, now_s, inflight, answers)
                if tell is not None and any(o.finish_reason is not None for o in outcomes):
                    tell(len(answers))
                look_up()
    except BaseException:
        if whole:
            empty(engine, inflight)
        raise
    return [answers[q.request.request_id] for q in asked]


def empty(engine: Engine, request_ids: Iterable[str]) -> None:
    """Let go of requests and take steps until nothing is open. No step may have raised before."""
    for request_id in request_ids:
        engine.cancel(request_id)
    while engine.has_work:
        with uninterrupted():
            engine.step()


def _take(outcome: Outcome, now_s: float, inflight: dict[str, _Open], answers: dict[str, Answer]) -> None:
    opened = inflight[outcome.request_id]
    if outcome.token_ids:
        opened.token_ids += outcome.token_ids
        opened.arrivals.append((now_s, len(outcome.token_ids)))
    if outcome.finish_reason is not None:
        del inflight[outcome.request_id]
        answers[outcome.request_id] = _answer(opened, outcome)


def _answer(opened: _Open, outcome: Outcome) -> Answer:
    figures, prompt = outcome.figures, opened.question.prompt
    if outcome.error is not None or figures is None or not opened.arrivals:
        raise PacelineError(f"question {prompt.question_id} failed: {outcome.error or 'it got no tokens'}")
    return Answer(
        prompt=prompt,
        prompt_tokens=figures.prompt_tokens,
        output_tokens=figures.completion_tokens,
        start_s=opened.start_s,
        arrivals=tuple(opened.arrivals),
        decode_passes=figures.decode_passes,
        decoded_tokens=figures.decoded_tokens,
        drafted_tokens=figures.drafted_tokens,
        verified_tokens=figures.verified_tokens,
        accepted_tokens=figures.accepted_tokens,
        token_ids=tuple(opened.token_ids),
    )
