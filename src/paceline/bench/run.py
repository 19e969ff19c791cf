"""One run in this process: the prompts through an engine, a fixed number of requests in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.bench.measure import MeasuredAnswer
from paceline.core.errors import PacelineError
from paceline.core.nouns import Request
from paceline.core.params import MAX_SEED
from paceline.core.system import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.bench.prompts import Prompt
    from paceline.core.nouns import Outcome
    from paceline.core.params import SamplingParams
    from paceline.engine.engine import Engine
    from paceline.serve.prompts import Prompts

TURN_S = 1.0  # that engines which are compared have at a time, so that a slow minute is everybody's


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


class Asking:
    """Questions that an engine is asked, a fixed number in flight, in turns with what others do meanwhile.

    Its clock stands still between turns, so that an answer's times are of its own engine's turns only.
    """

    def __init__(self, engine: Engine, asked: Sequence[Question], concurrency: int) -> None:
        self.answers: dict[str, MeasuredAnswer] = {}  # by request
        self._engine, self._asked, self._concurrency = engine, asked, concurrency
        self._waiting, self._inflight = deque(asked), dict[str, _Open]()
        self._whole = True  # a step that raised has left rows half-way; such an engine never gets empty
        self._clock_s = self._began_s = 0.0  # of the turns before, and when this one began

    @property
    def done(self) -> bool:
        """Whether every question has its answer."""
        return not (self._waiting or self._inflight)

    def in_order(self) -> list[MeasuredAnswer]:
        """Return the answers in the order of the questions."""
        return [self.answers[q.request.request_id] for q in self._asked]

    def play(self, seconds: float, tell: Callable[[], None] = lambda: None) -> None:
        """Go on for a turn, a step at least. Raises `PacelineError` if a request fails.

        tell: called when an answer has ended.
        """
        self._began_s = perf_counter()
        with uninterrupted() as look_up:
            while not self.done:
                if self._step():
                    tell()
                look_up()
                if perf_counter() - self._began_s >= seconds:
                    break
        self._engine.loop.wait()  # a pass that was begun is this turn's
        self._clock_s = self._now_s

    def leave(self) -> None:
        """Let go of what is not answered, unless a step has failed: the engine is empty then."""
        if self._whole:
            empty(self._engine, self._inflight)

    @property
    def _now_s(self) -> float:
        return self._clock_s + perf_counter() - self._began_s

    def _step(self) -> bool:
        """Take a step; return whether an answer has ended."""
        while self._waiting and len(self._inflight) < self._concurrency:
            question = self._waiting.popleft()
            self._engine.add(question.request)
            self._inflight[question.request.request_id] = _Open(question, self._now_s)
        self._whole = False
        outcomes, now_s = self._engine.step(), self._now_s
        self._whole = True
        for outcome in outcomes:
            _take(outcome, now_s, self._inflight, self.answers)
        return any(o.finish_reason is not None for o in outcomes)


def ask_in_turns(askings: Sequence[Asking], seconds: float, tell: Callable[[int], None] = lambda _: None) -> None:
    """Let whoever is furthest behind play until all are done. Raises `PacelineError` if a request fails.

    So each question is asked of all within seconds, and a machine's moods are everybody's. tell: how many answers
    there are. All engines are empty then, also after an error or Ctrl-C.
    """
    try:
        while unfinished := [a for a in askings if not a.done]:
            behind = min(unfinished, key=lambda a: len(a.answers))
            behind.play(seconds, lambda: tell(sum(len(a.answers) for a in askings)))
    except BaseException:
        for asking in askings:
            asking.leave()
        raise


def empty(engine: Engine, request_ids: Iterable[str]) -> None:
    """Let go of requests and take steps until nothing is open. No step may have raised before."""
    for request_id in request_ids:
        engine.cancel(request_id)
    while engine.has_work:
        with uninterrupted():
            engine.step()


def _take(outcome: Outcome, now_s: float, inflight: dict[str, _Open], answers: dict[str, MeasuredAnswer]) -> None:
    opened = inflight[outcome.request_id]
    if outcome.token_ids:
        opened.token_ids += outcome.token_ids
        opened.arrivals.append((now_s, len(outcome.token_ids)))
    if outcome.finish_reason is not None:
        del inflight[outcome.request_id]
        answers[outcome.request_id] = _answer(opened, outcome)


def _answer(opened: _Open, outcome: Outcome) -> MeasuredAnswer:
    figures, prompt = outcome.figures, opened.question.prompt
    if outcome.error is not None or figures is None or not opened.arrivals:
        raise PacelineError(f"question {prompt.question_id} failed: {outcome.error or 'it got no tokens'}")
    return MeasuredAnswer(
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
