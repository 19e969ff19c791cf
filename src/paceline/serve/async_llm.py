"""Python API for asyncio: an engine process for many callers.

from paceline import AsyncLLM, SamplingParams

async with AsyncLLM() as llm:
    answers = await asyncio.gather(*(llm.generate(p, SamplingParams(seed=1)) for p in prompts))
    async for delta in llm.stream("Once upon a time"):
        print(delta.text, end="")
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.core.errors import EngineDied, PacelineError, RequestError
from paceline.core.weight_source import TAGS
from paceline.serve.asking import Asking, as_messages, as_told, config_of, visible
from paceline.serve.engines import Disconnected
from paceline.serve.prompts import TokenPrompt
from paceline.serve.results import Completion, Delta
from paceline.serve.tensor_spool import write_tensors
from paceline.serve.tokenizer_cache import TokenizerCache
from paceline.serve.tool_chat import ChatCall, ChatExtras
from paceline.serve.weight_updates import WeightUpdates
from paceline.serve.worker.client import EngineClient
from paceline.serve.worker.commands import FlushCache, GoOn, Pause, ReleaseMemory, ResumeMemory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.core.params import SamplingParams, Speculation
    from paceline.core.request_nouns import Request
    from paceline.engine.assembly.build import Progress
    from paceline.engine.assembly.config import EngineConfig
    from paceline.serve.api.continuation import AnswerIds
    from paceline.serve.asking import Message, Prompt
    from paceline.serve.chat_options import ChatOptions
    from paceline.serve.prompts import Prompts
    from paceline.serve.worker.messages import Progress as ProgressMessage

LONG_CHARS = 16 << 10  # from this length on, a prompt is tokenised in a thread


class AsyncLLM(Asking):
    """A model in its own process, for one event loop; it writes `LLM`'s texts."""

    def __init__(
        self,
        model: str = "default",
        *,
        progress: Progress | None = None,
        chat: ChatOptions | None = None,
        **options: Any,
    ) -> None:
        """Check the options, those of `LLM`; `start` loads the model. Raises `ConfigError`."""
        super().__init__()
        self.config: EngineConfig = config_of(model, options)
        self._progress = progress
        self._client: EngineClient | None = None
        self._chat = chat
        self._tokenizers = TokenizerCache(chat)
        self._prompts: Prompts | None = None
        self._open_tokens = 0  # of open requests: prompts, and answers so far
        self._freed = asyncio.Event()  # set when some of them are open no more
        self._turn = asyncio.Lock()
        self._updates = WeightUpdates()

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> AsyncLLM:
        """Load the model in a process, unless it runs. Raises `ConfigError`, `ModelError`, `EngineDied`."""
        if self._client is not None:
            return self
        with ExitStack() as stack:
            show = stack.enter_context(visible(self._progress))

            def report(message: ProgressMessage) -> None:
                if show is not None:
                    show(message.what, message.done, message.total)

            self._client = EngineClient(self.config, report, self._tokenizers.of)
            self._client.on_language = self._tokenizers.expect
            try:
                self._prompts = await self._tokenizers.of(await self._client.first_ready)
            except BaseException:
                await self.close()
                raise
        return self

    async def close(self) -> None:
        """End the engine's process; open calls raise `EngineDied`. May be called twice."""
        client, self._client = self._client, None
        if client is not None:
            await client.stop()
        self._tokenizers.close()
        self._tokenizers = TokenizerCache(self._chat)  # a closed cache makes no prompts for another start
        await asyncio.to_thread(self._updates.spool.clear)

    @property
    def prompts(self) -> Prompts:
        """Conversion of prompts to token ids."""
        if self._client is None or self._prompts is None:
            raise EngineDied("this AsyncLLM is not running; use `async with AsyncLLM(...)`, or call start()")
        return self._prompts

    # Answers -----------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, answer_ids: AnswerIds | None = None
    ) -> Completion:
        """Continue a prompt, a text or token ids. Raises `RequestError`, `EngineDied`.

        answer_ids: first tokens of the answer; the result has all of it. With n answers, a list for each.
        """
        return await self._complete(await self._asked(prompt), params, answer_ids)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        answer_ids: AnswerIds | None = None,
        **extras: Any,
    ) -> Completion:
        """Answer a conversation; `extras` are those of `ChatExtras`. Raises `RequestError`, `EngineDied`."""
        call = await asyncio.to_thread(ChatCall.of, self.prompts, messages, ChatExtras(**extras))
        asked = call.params(self._fitting(call.prompt.ids, params))
        return call.finished(await self._complete(call.prompt, asked, answer_ids))

    async def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        *,
        answer_ids: AnswerIds | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Yield what each step adds to the answers; with n, they come interleaved.

        answer_ids: first tokens of the answer, or of each, which are not yielded again. A stream that is closed
        early, as by `contextlib.aclosing`, cancels what is open. Raises `RequestError`, `EngineDied`.
        """
        asked = self._or_default(params)
        told = as_told(answer_ids, asked.n)
        requests = self._requests(await self._asked(prompt), asked, told, speculation)
        async with aclosing(self._deltas(requests)) as deltas:
            async for delta in deltas:
                yield delta

    async def _complete(
        self, prompt: TokenPrompt, params: SamplingParams | None, answer_ids: AnswerIds | None
    ) -> Completion:
        asked = self._or_default(params)
        requests = self._requests(prompt, asked, as_told(answer_ids, asked.n))
        requests = [replace(request, whole=True) for request in requests]
        answers = [self._open_answer(request) for request in requests]
        async with aclosing(self._deltas(requests)) as deltas:
            async for delta in deltas:
                answers[delta.choice].outcomes.append(delta.outcome)
        return Completion(prompt.ids, tuple(answer.answer() for answer in answers))

    async def _asked(self, prompt: Prompt | Sequence[Message]) -> TokenPrompt:
        messages = as_messages(prompt)
        if messages is not None:  # a template may take its time
            return TokenPrompt(await asyncio.to_thread(self.prompts.of_messages, messages))
        if len(prompt) < LONG_CHARS:
            return self._prompt(prompt)
        return await asyncio.to_thread(self._prompt, prompt)

    async def _deltas(self, requests: Sequence[Request]) -> AsyncGenerator[Delta, None]:
        """Submit one prompt's requests once they have room, and yield what comes."""
        size = sum(len(request.prompt_ids) + len(request.told) for request in requests)
        if (grammar := requests[0].params.grammar) is not None:  # checked in a limited process, as in the server
            await asyncio.to_thread(self._tokenizers.check_grammar, grammar)
        await self._wait_for_room(size)
        try:
            answers = await self._running.submit(requests)
            num_open = len(requests)
            try:
                while num_open:
                    event = await answers.next()
                    if isinstance(event, PacelineError):
                        raise event
                    assert not isinstance(event, Disconnected)
                    index, outcome = event
                    num_open -= outcome.finish_reason is not None
                    yield Delta(requests[index].choice, outcome)
            finally:
                await answers.close()
        finally:
            self._open_tokens -= size
            self._freed.set()

    async def _wait_for_room(self, size: int) -> None:
        """Wait, in order of arrival, until so many prompt tokens have room."""
        async with self._turn:
            while self._open_tokens and self._open_tokens + size > self.config.limits.max_queued_tokens:
                self._freed.clear()
                await self._freed.wait()
            self._open_tokens += size

    # Weights and memory ------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        """Version of the weights, see `update_weights`."""
        return self._running.commands.version

    async def update_weights(
        self, weights: str | os.PathLike[str] | Mapping[str, NDArray[floating]], version: str
    ) -> Mapping[str, Sequence[str]]:
        """Take newer weights: a folder, a .gguf file, or tensors by name.

        Tensors that are left out stay. Open requests go on with the newer weights, computed anew. Returns what
        became of the drafters. Raises `ModelError`, `ConfigError`; then nothing has changed.
        """
        commands = self._running.commands
        if not isinstance(weights, Mapping):
            return (await self._updates.from_place(commands, os.fspath(weights), version)).drafters
        with self._updates.spool.coming() as path:
            await asyncio.to_thread(write_tensors, weights, path)
        return (await self._updates.from_staged(commands, version)).drafters

    async def abort(self) -> int:
        """End all that is open, with finish reason `abort`; return how many."""
        return await self._running.commands.abort(lambda _: True)

    async def pause_generation(self, mode: str = "abort") -> None:
        """Take no step until `continue_generation`. mode: `abort` what is open, or `keep` it."""
        if mode not in ("abort", "keep"):
            raise RequestError("a pause keeps or aborts what is open: mode is abort or keep", "mode")
        if mode == "abort":
            await self.abort()
        await self._running.commands.send(Pause())

    async def continue_generation(self) -> None:
        """Take steps again."""
        await self._running.commands.send(GoOn())

    async def flush_cache(self) -> None:
        """Empty the prefix cache."""
        await self._running.commands.send(FlushCache())

    async def release_memory(self, tags: Sequence[str] = TAGS) -> None:
        """Give back the memory of weights, KV or both. Raises `RequestError` while requests are open."""
        await self._running.commands.send(ReleaseMemory(tuple(tags)))

    async def resume_memory(self, tags: Sequence[str] = TAGS) -> None:
        """Take that memory again; updated weights are read from where they came. Raises `PacelineError`."""
        await self._running.commands.send(ResumeMemory(tuple(tags)))

    @property
    def _running(self) -> EngineClient:
        if self._client is None:
            raise EngineDied("this AsyncLLM is closed")
        return self._client
