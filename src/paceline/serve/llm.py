"""Python API: an engine in this process.

from paceline import LLM, SamplingParams

with LLM() as llm:
    print(llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(seed=1)).text)
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, EngineDied, QueueFull
from paceline.core.system import uninterrupted
from paceline.core.weight_source import TAGS, WeightSource
from paceline.engine.assembly.owner import flush, load_engine
from paceline.model.template import compiled
from paceline.serve.asking import Asking, Message, Prompt, as_list, as_messages, as_told, config_of, visible
from paceline.serve.chat_options import ChatOptions
from paceline.serve.prompts import TokenPrompt
from paceline.serve.results import Completion, Delta, OpenAnswer
from paceline.serve.tool_chat import ChatCall, ChatExtras

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.core.params import SamplingParams, Speculation
    from paceline.core.request_nouns import Outcome, Request
    from paceline.engine.assembly.build import Built, Progress
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.assembly.owner import EngineOwner
    from paceline.engine.engine import Engine
    from paceline.engine.renewal import Renewal
    from paceline.serve.api.continuation import AnswerIds
    from paceline.serve.prompts import Prompts


class LLM(Asking):
    """A model in this process, not thread-safe; one thread may have several streams open."""

    def __init__(
        self,
        model: str = "default",
        *,
        progress: Progress | None = None,
        chat: ChatOptions | None = None,
        **options: Any,
    ) -> None:
        """Load a model. `options` are those of `EngineConfig` and `Limits`, or vLLM's `speculative_config`.

        chat: template and parsers, and if users' text may become control tokens.

        Raises `ConfigError` for bad options, `ModelError` for a bad model.
        """
        self._open(config_of(model, options), progress, chat)

    @classmethod
    def of(cls, config: EngineConfig, progress: Progress | None = None) -> LLM:
        """Load a model from a config. Raises as the class does."""
        llm = cls.__new__(cls)
        llm._open(config, progress)
        return llm

    def _open(self, config: EngineConfig, progress: Progress | None, chat: ChatOptions | None = None) -> None:
        if config.kv_events is not None:
            raise ConfigError(
                "kv_events are published by the process of an engine: use AsyncLLM or paceline serve"
            )
        with visible(progress) as callback:
            self._owner: EngineOwner | None = load_engine(config, callback)
        Asking.__init__(self)
        self._prompts = _prompts(self._owner.built, chat or ChatOptions())
        self._sinks: dict[str, Callable[[Outcome], None]] = {}  # request id -> receiver of its outcomes

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the model. Later calls raise `EngineDied`."""
        if self._owner is not None:
            self._owner.close()
        self._owner = None

    @property
    def built(self) -> Built:
        """The engine, its template and its limits. Raises `EngineDied` while memory is given back."""
        return self._owned.built

    @property
    def _owned(self) -> EngineOwner:
        if self._owner is None:
            raise EngineDied("this LLM is closed")
        return self._owner

    @property
    def prompts(self) -> Prompts:
        """Conversion of prompts to token ids."""
        _ = self._owned  # raises once this LLM is closed
        return self._prompts

    @property
    def _engine(self) -> Engine:
        return self.built.engine

    # Whole answers -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
        *,
        answer_ids: AnswerIds | None = None,
    ) -> list[Completion]:
        """Continue each prompt, a text or token ids.

        params: one for all prompts, or one for each. on_done: called with each prompt's index and completion.
        answer_ids: first tokens of the answer; the result has all of it. Of several answers a list for each,
        prompt by prompt. Raises `RequestError`; then nothing is left open.
        """
        asked = [self._prompt(prompt) for prompt in as_list(prompts)]
        return self._complete(asked, self._one_for_each(params, len(asked)), on_done, answer_ids)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        answer_ids: AnswerIds | None = None,
        **extras: Any,
    ) -> Completion:
        """Answer a conversation; `extras` are tools and others of `ChatExtras`. Raises `RequestError`."""
        call = ChatCall.of(self.prompts, messages, ChatExtras(**extras))
        asked = call.params(self._fitting(call.prompt.ids, params))
        return call.finished(self._complete([call.prompt], [asked], None, answer_ids)[0])

    def _complete(
        self,
        prompts: Sequence[TokenPrompt],
        params: Sequence[SamplingParams],
        on_done: Callable[[int, Completion], None] | None,
        answer_ids: AnswerIds | None,
    ) -> list[Completion]:
        told = iter(as_told(answer_ids, sum(p.n for p in params)))
        written: list[list[OpenAnswer]] = []
        waiting: deque[tuple[Request, OpenAnswer]] = deque()
        for prompt, asked in zip(prompts, params, strict=True):
            requests = self._requests(prompt, asked, list(islice(told, asked.n)))
            written.append([self._open_answer(request) for request in requests])
            waiting.extend(zip(requests, written[-1], strict=True))
        open_ids = [request.request_id for request, _ in waiting]
        left = set(range(len(prompts)))
        finished: dict[int, Completion] = {}
        try:
            while left:
                for index in self._until_one_is_done(waiting, {i: written[i] for i in left}):
                    left.discard(index)
                    finished[index] = Completion(prompts[index].ids, tuple(w.answer() for w in written[index]))
                    if on_done is not None:
                        on_done(index, finished[index])
        finally:
            self._drop(open_ids)
        return [finished[index] for index in range(len(prompts))]

    def _until_one_is_done(
        self, waiting: deque[tuple[Request, OpenAnswer]], written: Mapping[int, Sequence[OpenAnswer]]
    ) -> list[int]:
        """Step until some prompts have all their answers, and return their indices."""
        with uninterrupted() as allow_interrupt:
            while True:
                self._queue(waiting)
                self._step()
                if done := [i for i, answers in written.items() if all(w.done for w in answers)]:
                    return done
                allow_interrupt()

    def _queue(self, waiting: deque[tuple[Request, OpenAnswer]]) -> None:
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
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        *,
        answer_ids: AnswerIds | None = None,
    ) -> Generator[Delta, None, None]:
        """Yield what each step adds to the answers; with n, they come interleaved.

        speculation: wanted by this stream; only its law may change the text. answer_ids: first tokens of the
        answer, or of each, which are not yielded again.

        Raises `RequestError` at once. A stream that is closed or dropped early cancels what is open.
        """
        messages = as_messages(prompt)
        begun = self._prompt(prompt) if messages is None else TokenPrompt(self.prompts.of_messages(messages))
        asked = self._or_default(params)
        stream = self._deltas(self._requests(begun, asked, as_told(answer_ids, asked.n), speculation))
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

    # Weights and memory ------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        """Version of the weights, see `update_weights`."""
        return self._owned.version

    def update_weights(
        self, weights: str | os.PathLike[str] | Mapping[str, NDArray[floating]], version: str
    ) -> Renewal:
        """Take newer weights: a folder, a .gguf file, or all tensors by name.

        Open streams go on with them, computed anew. Raises `ModelError`, `ConfigError`; then nothing has changed.
        """
        if isinstance(weights, Mapping):
            return self._owned.update_from(weights, version)
        return self._owned.update(WeightSource(model=os.fspath(weights)), version)

    def abort(self) -> None:
        """End all that is open; streams yield what there is, with finish reason `abort`."""
        for request_id in self._sinks:
            self._engine.cancel(request_id, "abort")

    def flush_cache(self) -> None:
        """Empty the prefix cache."""
        flush(self._engine)

    def release_memory(self, tags: Sequence[str] = TAGS) -> None:
        """Give back the memory of weights, KV or both. Raises `RequestError` while streams are open."""
        if not self._owned.asleep:  # let aborted and dropped requests leave, and deliver their outcomes
            self._engine.settle()
            self._deliver(self._engine.outputs.take_outcomes())
        self._owned.release(tags)

    def resume_memory(self, tags: Sequence[str] = TAGS) -> None:
        """Take that memory again; updated weights are read from where they came. Raises `PacelineError`."""
        self._owned.resume(tags)

    # The engine --------------------------------------------------------------------------------------

    def _add(self, request: Request, sink: Callable[[Outcome], None]) -> None:
        self._engine.add(request)
        self._sinks[request.request_id] = sink

    def _step(self) -> None:
        self._deliver(self._engine.step())

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            sink = self._sinks.get(outcome.request_id)
            if sink is not None:
                sink(outcome)

    def _drop(self, request_ids: Sequence[str]) -> None:
        """Cancel what is still open and discard its outcomes."""
        for request_id in request_ids:
            self._sinks.pop(request_id, None)
            if self._owner is not None and not self._owner.asleep:
                self._owner.built.engine.cancel(request_id)


def _prompts(built: Built, chat: ChatOptions) -> Prompts:
    """Return the conversion of prompts; templates are rendered in this process."""
    template, engine = compiled(chat.source(built.template)), built.engine
    size = engine.target.config.vocab_size
    return chat.prompts(engine.tokenizer, template, built.max_len, size, built.sampling)
