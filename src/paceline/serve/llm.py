"""Python API: an engine in this process.

from paceline import LLM, SamplingParams

with LLM() as llm:
    print(llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(seed=1)).text)
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, EngineDied, QueueFull, RequestError, suggest
from paceline.core.params import SamplingParams
from paceline.core.sampling_defaults import default_params
from paceline.core.system import uninterrupted
from paceline.engine.assembly.build import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.speculative_config import options_of
from paceline.engine.scheduler import Limits
from paceline.serve.prompts import Prompts, requests_of, seed_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from paceline.core.nouns import Figures, FinishReason, Outcome, Request, TokenLogprobs
    from paceline.engine.assembly.build import Built, Progress
    from paceline.engine.engine import Engine

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None  # one for each token, if asked for
    figures: Figures
    error: str | None = None  # with finish_reason "error"


@dataclass(frozen=True, slots=True)
class Completion:
    """The n answers to one prompt. The first one's fields are properties."""

    prompt_ids: tuple[int, ...]
    choices: tuple[Answer, ...]  # [n]

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first answer's token ids."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Reason why the first answer ended."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token id that ended the first answer."""
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The first answer's log-probabilities."""
        return self.choices[0].logprobs

    @property
    def figures(self) -> Figures:
        """Cost of the first answer and effect of speculation on it."""
        return self.choices[0].figures

    @property
    def seed(self) -> int:
        """The seed of all answers."""
        return self.figures.seed


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens and text that one step added to one answer of a stream."""

    choice: int
    outcome: Outcome

    @property
    def text(self) -> str:
        """The text added."""
        return self.outcome.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens added."""
        return self.outcome.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the answer ended; None while it is open."""
        return self.outcome.finish_reason

    @property
    def figures(self) -> Figures | None:
        """Cost of the answer; in its last delta only."""
        return self.outcome.figures


@dataclass(slots=True, eq=False)
class _OpenAnswer:
    """Outcomes of one answer so far."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return bool(self.outcomes) and self.outcomes[-1].finish_reason is not None

    def answer(self) -> Answer:
        last = self.outcomes[-1]
        assert last.finish_reason is not None
        assert last.figures is not None
        scored = [o.logprobs for o in self.outcomes if o.logprobs is not None]
        return Answer(
            text="".join(o.text for o in self.outcomes),
            token_ids=tuple(itertools.chain.from_iterable(o.token_ids for o in self.outcomes)),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=tuple(itertools.chain.from_iterable(scored)) if scored else None,
            figures=last.figures,
            error=last.error,
        )


class LLM:
    """A model in this process, not thread-safe; one thread may have several streams open."""

    def __init__(self, model: str = "default", *, progress: Progress | None = None, **options: Any) -> None:
        """Load a model. `options` are those of `EngineConfig` and `Limits`, or vLLM's `speculative_config`.

        Raises `ConfigError` for bad options, `ModelError` for a bad model.
        """
        self._open(config_of(model, options), progress)

    @classmethod
    def of(cls, config: EngineConfig, progress: Progress | None = None) -> LLM:
        """Load a model from a config. Raises as the class does."""
        llm = cls.__new__(cls)
        llm._open(config, progress)
        return llm

    def _open(self, config: EngineConfig, progress: Progress | None) -> None:
        with _visible(progress) as callback:
            self._built: Built | None = build(config, callback)
        self._default = default_params(self._built.sampling)
        self._numbers = itertools.count()
        self._sinks: dict[str, Callable[[Outcome], None]] = {}  # request id -> receiver of its outcomes

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the model. Later calls raise `EngineDied`."""
        self._built = None

    @property
    def built(self) -> Built:
        """The engine, its template and its limits."""
        if self._built is None:
            raise EngineDied("this LLM is closed")
        return self._built

    @property
    def prompts(self) -> Prompts:
        """Conversion of prompts to token ids."""
        size = self._engine.target.config.vocab_size
        built = self.built
        return Prompts(self._engine.tokenizer, built.template, built.max_len, size, sampling=built.sampling)

    @property
    def default_params(self) -> SamplingParams:
        """Parameters of calls that give none: the model's own sampling, else temperature 0.7 and top_p 0.95.

        `SamplingParams()` itself is neutral: temperature 1, no filter.
        """
        return self._default

    @property
    def _engine(self) -> Engine:
        return self.built.engine

    # Whole answers -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Continue each prompt, a text or token ids.

        params: one for all prompts, or one for each. on_done: called with each prompt's index and completion.
        Raises `RequestError`; then nothing is left open.
        """
        all_ids = [self._prompt_ids(prompt) for prompt in _as_list(prompts)]
        return self._complete(all_ids, self._one_for_each(params, len(all_ids)), on_done)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation. Raises `RequestError`."""
        return self._complete([self.prompts.of_messages(messages)], [self._or_default(params)], None)[0]

    def _complete(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        on_done: Callable[[int, Completion], None] | None,
    ) -> list[Completion]:
        written = [[_OpenAnswer() for _ in range(p.n)] for p in params]
        waiting: deque[tuple[Request, _OpenAnswer]] = deque()
        for prompt_ids, asked, answers in zip(prompts, params, written, strict=True):
            waiting.extend(zip(self._requests(prompt_ids, asked), answers, strict=True))
        open_ids = [request.request_id for request, _ in waiting]
        left = set(range(len(prompts)))
        finished: dict[int, Completion] = {}
        try:
            while left:
                for index in self._until_one_is_done(waiting, {i: written[i] for i in left}):
                    left.discard(index)
                    finished[index] = Completion(prompts[index], tuple(w.answer() for w in written[index]))
                    if on_done is not None:
                        on_done(index, finished[index])
        finally:
            self._drop(open_ids)
        return [finished[index] for index in range(len(prompts))]

    def _until_one_is_done(
        self, waiting: deque[tuple[Request, _OpenAnswer]], written: Mapping[int, Sequence[_OpenAnswer]]
    ) -> list[int]:
        """Step until some prompts have all their answers, and return their indices."""
        with uninterrupted() as allow_interrupt:
            while True:
                self._queue(waiting)
                self._step()
                if done := [i for i, answers in written.items() if all(w.done for w in answers)]:
                    return done
                allow_interrupt()

    def _queue(self, waiting: deque[tuple[Request, _OpenAnswer]]) -> None:
        """Add waiting requests until the engine's queue is full."""
        while waiting:
            request, written = waiting[0]
            try:
                self._add(request, written.outcomes.append)
            except QueueFull:
                if not self._engine.has_work:
                    raise
                return
            waiting.popleft()

    # Streams -----------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """Yield what each step adds to the answers; with n, they come interleaved.

        Raises `RequestError` at once. A stream that is closed or dropped early cancels what is open.
        """
        messages = _as_messages(prompt)
        prompt_ids = self._prompt_ids(prompt) if messages is None else self.prompts.of_messages(messages)
        stream = self._deltas(self._requests(prompt_ids, self._or_default(params)))
        next(stream)  # enters its `try`: a generator that has not started would not run its `finally`
        return stream

    def _deltas(self, requests: Sequence[Request]) -> Generator[Delta, None, None]:
        """Add requests and yield None, then yield what each step adds. Raises `RequestError`."""
        choices = {request.request_id: request.choice for request in requests}
        outcomes: deque[Outcome] = deque()
        num_open = len(requests)
        try:
            for request in requests:
                self._add(request, outcomes.append)
            yield None  # type: ignore[misc]
            while num_open:
                while not outcomes:
                    with uninterrupted():
                        self._step()
                outcome = outcomes.popleft()
                num_open -= outcome.finish_reason is not None
                yield Delta(choices[outcome.request_id], outcome)
        finally:
            self._drop(list(choices))

    # The engine --------------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self.prompts.of_text(prompt)
        if isinstance(prompt, Sequence) and all(isinstance(i, int) and i >= 0 for i in prompt):
            return self.prompts.of_ids(prompt)
        raise RequestError(f"a prompt must be a text or token ids, not {type(prompt).__name__}", "prompt")

    def _or_default(self, params: object) -> SamplingParams:
        """Return parameters, the default ones for None. Raises `RequestError` for any other type."""
        if params is None:
            return self._default
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        return params

    def _one_for_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if not isinstance(params, list | tuple):
            return [self._or_default(params)] * count
        if len(params) != count:
            raise RequestError(f"{count} prompts need one SamplingParams or {count}, not {len(params)}")
        return [self._or_default(each) for each in params]

    def _requests(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> list[Request]:
        """Return one prompt's requests; the default max_tokens shrinks to what fits. Raises `PromptTooLong`."""
        room = self.prompts.room(prompt_ids)
        if params is self._default and params.max_tokens > room:
            params = replace(params, max_tokens=room)
        self.prompts.check_room(prompt_ids, params.max_tokens)  # now, before any prompt is answered
        name = f"llm-{next(self._numbers)}"
        return requests_of(name, prompt_ids, params, seed_of(params), time.monotonic())

    def _add(self, request: Request, sink: Callable[[Outcome], None]) -> None:
        self._engine.add(request)
        self._sinks[request.request_id] = sink

    def _step(self) -> None:
        for outcome in self._engine.step():
            sink = self._sinks.get(outcome.request_id)
            if sink is not None:
                sink(outcome)

    def _drop(self, request_ids: Sequence[str]) -> None:
        """Cancel what is still open and discard its outcomes."""
        for request_id in request_ids:
            self._sinks.pop(request_id, None)
            if self._built is not None:
                self._built.engine.cancel(request_id)


def _as_list(prompts: Prompt | Iterable[Prompt]) -> Sequence[Prompt]:
    """Return one or several prompts as a list. Raises `RequestError` for any other type."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be one or several, not {type(prompts).__name__}", "prompt")
    items = list(prompts)  # first, since looking at an iterator's items would use it up
    return [items] if items and all(isinstance(p, int) for p in items) else items  # type: ignore[list-item, return-value]


def _as_messages(prompt: Any) -> Sequence[Message] | None:
    """Return the argument if it is a conversation, else None."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return prompt if is_list and prompt and all(isinstance(m, Mapping) for m in prompt) else None


def config_of(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Return an engine's config from options of `EngineConfig` and `Limits` by name. Raises `ConfigError`.

    `speculative_config` is vLLM's, a mapping or JSON, in place of `draft`.
    """
    options = dict(options)
    if (given := options.pop("speculative_config", None)) is not None:
        draft, profile = options_of(given, options.get("draft"), options.get("profile"))
        options |= {"draft": draft, "profile": profile}
    own = {f.name for f in fields(EngineConfig)} - {"model", "limits"}
    limits = {f.name for f in fields(Limits)}
    for name in options:
        if name not in own | limits:
            raise ConfigError(f"unknown option {name!r}{suggest(name, own | limits)}")
    config = EngineConfig(model=model, **{k: v for k, v in options.items() if k in own})
    given = {k: v for k, v in options.items() if k in limits}
    return replace(config, limits=replace(config.usual_limits, **given))


@contextmanager
def _visible(progress: Progress | None) -> Iterator[Progress | None]:
    """Yield the progress callback, or on a terminal a bar if there is none."""
    if progress is not None or not sys.stderr.isatty():
        yield progress
        return
    from paceline.serve.terminal.banner import LoadingBar

    with LoadingBar() as bar:
        yield bar
