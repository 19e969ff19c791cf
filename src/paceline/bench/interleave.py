"""Engines in this process answer questions in alternating time slices, a fixed number in flight.

Slices are short, so a slow minute of the machine slows every engine that is compared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from paceline.bench.measure import MeasuredAnswer
from paceline.core.errors import PacelineError
from paceline.core.params import MAX_SEED
from paceline.core.request_nouns import Request
from paceline.core.system import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline.backend.pass_thread import PassThread
    from paceline.bench.prompt_file import Prompt
    from paceline.core.params import SamplingParams
    from paceline.core.request_nouns import Outcome
    from paceline.engine.engine import Engine
    from paceline.engine.stats import Stats
    from paceline.serve.prompts import Prompts

T = TypeVar("T")

SLICE_S = 1.0  # length of a time slice


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A prompt and its request, with the same seed for every drafter and repeat."""

    prompt: Prompt
    request: Request


@dataclass(slots=True, eq=False)
class _OpenQuestion:
    """A request in flight."""

    question: Question
    start_s: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, float]] = field(default_factory=list)  # (time_s, number of tokens)


def make_questions(
    prompts: Sequence[Prompt], encode: Prompts, params: SamplingParams, seed: int
) -> list[Question]:
    """Return a request for each prompt, with seed + index as its seed. Raises `RequestError`."""
    return [
        Question(p, Request(str(index), _prompt_ids(p, encode), params, (seed + index) & MAX_SEED))
        for index, p in enumerate(prompts)
    ]


def _prompt_ids(prompt: Prompt, encode: Prompts) -> tuple[int, ...]:
    """Return a prompt's token ids. The chat template is applied if the model has one."""
    if encode.template is None:
        return encode.of_text(prompt.text)
    return encode.of_messages([{"role": "user", "content": prompt.text}])


class SlicedRun:
    """Questions to one engine, a fixed number in flight, answered one time slice after another.

    The run's clock stands still between its slices, so the times of an answer include no time of other engines.
    """

    def __init__(
        self, engine: Engine, questions: Sequence[Question], concurrency: int, worker: PassThread | None = None
    ) -> None:
        """worker: the thread that the engine lives on; None for the caller's."""
        self.engine = engine
        self.answers: dict[str, MeasuredAnswer] = {}  # by request id
        self.seconds = 0.0  # of all slices so far
        self.tokens = 0  # output tokens of all slices so far
        self._questions = questions
        self._concurrency = concurrency
        self._worker = worker
        self._waiting = deque(questions)
        self._in_flight: dict[str, _OpenQuestion] = {}
        self._between_steps = True  # False after a step that raised: the engine's rows are half-way
        self._slice_start_s = 0.0
        self._before: Stats = engine.stats()
        self._after: Stats | None = None

    @property
    def done(self) -> bool:
        """True once every question has its answer."""
        return not (self._waiting or self._in_flight)

    @property
    def full(self) -> bool:
        """True while `concurrency` requests are in flight, or will be with the next step."""
        return bool(self._waiting) or len(self._in_flight) >= self._concurrency

    @property
    def rate(self) -> float:
        """Output tokens per second of its slices."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that the engine has computed in all."""
        return self.call(self.engine.stats).prefilled_tokens

    @property
    def stats(self) -> Stats:
        """Engine statistics from the start of the run to its stop, or to now."""
        after = self.call(self.engine.stats) if self._after is None else self._after
        return after.since(self._before)

    def in_order(self) -> list[MeasuredAnswer]:
        """Return the answers in the order of the questions."""
        return [self.answers[q.request.request_id] for q in self._questions]

    def run_slice(
        self, seconds: float = SLICE_S, on_answer: Callable[[], None] = lambda: None
    ) -> tuple[float, int]:
        """Run for one slice, at least one step; return its seconds and output tokens.

        Raises `PacelineError` if a request fails. on_answer: called whenever an answer has ended.
        """
        return self.call(partial(self._run_slice, seconds, on_answer))

    def _run_slice(self, seconds: float, on_answer: Callable[[], None]) -> tuple[float, int]:
        tokens_before = self.engine.stats().output_tokens
        self._slice_start_s = perf_counter()
        with uninterrupted() as raise_if_pressed:
            while not self.done:
                if self._step():
                    on_answer()
                raise_if_pressed()
                if perf_counter() - self._slice_start_s >= seconds:
                    break
        if self.done:
            cancel_all(self.engine, ())  # a late loop may still have a pass to take in
        self.engine.loop.wait()  # a pass that is running belongs to this slice, not to another engine's
        slice_s = perf_counter() - self._slice_start_s
        tokens = self.engine.stats().output_tokens - tokens_before  # includes tokens reported with the next step
        self.seconds += slice_s
        self.tokens += tokens
        return slice_s, tokens

    def _step(self) -> bool:
        """Take a step; return whether an answer has ended."""
        while self._waiting and len(self._in_flight) < self._concurrency:
            question = self._waiting.popleft()
            self.engine.add(question.request)
            self._in_flight[question.request.request_id] = _OpenQuestion(question, self._now_s)
        self._between_steps = False
        outcomes = self.engine.step()
        now_s = self._now_s
        self._between_steps = True
        for outcome in outcomes:
            _record(outcome, now_s, self._in_flight, self.answers)
        return any(o.finish_reason is not None for o in outcomes)

    @property
    def _now_s(self) -> float:
        return self.seconds + perf_counter() - self._slice_start_s

    def stop(self) -> None:
        """Freeze the statistics and cancel unanswered requests, unless a step has failed."""
        self.call(self._stop)

    def _stop(self) -> None:
        self._after = self.engine.stats()
        if self._between_steps:
            cancel_all(self.engine, self._in_flight)
        self._waiting.clear()
        self._in_flight.clear()

    def finish(self, name: str) -> None:
        """Stop. Raises `PacelineError` if a drafter ever failed: the engine may have dropped it."""
        self.stop()
        if self._after is not None and self._after.drafter_failures:
            raise PacelineError(f"{name}: a drafter failed; the log says why, and nothing is recorded")

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the engine's thread."""
        return function() if self._worker is None else self._worker.call(function)


def cancel_all(engine: Engine, request_ids: Iterable[str]) -> None:
    """Cancel requests and take steps until nothing is open. No step may have raised before."""
    for request_id in request_ids:
        engine.cancel(request_id)
    while engine.has_work:
        with uninterrupted():
            engine.step()


def _record(
    outcome: Outcome, now_s: float, in_flight: dict[str, _OpenQuestion], answers: dict[str, MeasuredAnswer]
) -> None:
    opened = in_flight[outcome.request_id]
    if outcome.token_ids:
        opened.token_ids += outcome.token_ids
        opened.arrivals.append((now_s, len(outcome.token_ids)))
    if outcome.finish_reason is not None:
        del in_flight[outcome.request_id]
        answers[outcome.request_id] = _answer(opened, outcome)


def _answer(opened: _OpenQuestion, outcome: Outcome) -> MeasuredAnswer:
    figures, prompt = outcome.figures, opened.question.prompt
    if outcome.error is not None or figures is None or not opened.arrivals:
        raise PacelineError(f"question {prompt.question_id} failed: {outcome.error or 'it got no tokens'}")
    return MeasuredAnswer(prompt, figures, opened.start_s, tuple(opened.arrivals), tuple(opened.token_ids))


# Several engines ---------------------------------------------------------------------------------


def interleave(
    runs: Sequence[SlicedRun], seconds: float = SLICE_S, on_progress: Callable[[int], None] = lambda _: None
) -> None:
    """Give each slice to the run with the fewest answers until all are done.

    Every question is thus asked of all engines within seconds. Raises `PacelineError` if a request fails; all
    engines are empty then, as they are after Ctrl-C. on_progress: called with the number of answers.
    """
    try:
        while unfinished := [run for run in runs if not run.done]:
            behind = min(unfinished, key=lambda run: len(run.answers))
            behind.run_slice(seconds, lambda: on_progress(sum(len(run.answers) for run in runs)))
    except BaseException:
        for run in runs:
            run.stop()
        raise


def warm_run(
    engine: Engine, questions: Sequence[Question], concurrency: int, worker: PassThread | None = None
) -> SlicedRun:
    """Return a run whose engine has served at this concurrency and whose caches are empty."""
    before = SlicedRun(engine, questions[:concurrency], concurrency, worker)
    while not before.done:
        before.run_slice()
    before.call(engine.forget)
    return SlicedRun(engine, questions, concurrency, worker)


def round_robin(runs: Mapping[str, SlicedRun]) -> None:
    """Give the runs slices in rotation until all are done. Raises `PacelineError` if one fails."""
    while not all(run.done for run in runs.values()):
        for run in runs.values():
            if not run.done:
                run.run_slice()
    for name, run in runs.items():
        run.finish(name)


def measure_rates(
    engines: Mapping[str, Engine], questions: Sequence[Question], concurrency: int
) -> dict[str, float]:
    """Return the tokens per second of each engine on the same questions, in alternating slices.

    Each engine begins cold and answers all questions. A rate taken until fewer than `concurrency` are open would
    count prompts whose answers are missing. Plain decoding, whose rows end together, would lack other answers than
    drafts. Raises `PacelineError` if a drafter failed.
    """
    runs = {name: warm_run(engine, questions, concurrency) for name, engine in engines.items()}
    round_robin(runs)
    return {name: run.rate for name, run in runs.items()}
