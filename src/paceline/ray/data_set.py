"""Ray Data: answers to the prompts of a data set."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from paceline.core.params import SamplingParams
from paceline.serve.async_llm import AsyncLLM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from paceline.serve.results import Completion


class Generate:
    """Class for `Dataset.map_batches` that adds the columns text, token_ids and finish_reason.

    Batches overlap, so that no engine waits for the last row of a batch:

        data.map_batches(Generate, fn_constructor_args=("default",), concurrency=2, batch_size=32)
    """

    def __init__(
        self,
        model: str = "default",
        params: Mapping[str, Any] | None = None,
        prompt: str = "prompt",
        **options: Any,
    ) -> None:
        """params: fields of `SamplingParams`. prompt: column of texts, token ids or conversations.

        options: those of `AsyncLLM`. Raises `ConfigError`, `RequestError`.
        """
        self._llm = AsyncLLM(model, **options)
        self._params = SamplingParams(**params) if params is not None else None
        self._prompt = prompt
        self._start: asyncio.Task[AsyncLLM] | None = None

    async def __call__(self, batch: Mapping[str, Sequence[Any]]) -> AsyncIterator[dict[str, Sequence[Any]]]:
        """Yield a batch with its answers."""
        if self._start is None:
            self._start = asyncio.create_task(self._llm.start())
        await self._start
        found = await asyncio.gather(*(self._answer(prompt) for prompt in batch[self._prompt]))
        yield {
            **batch,
            "text": [one.text for one in found],
            "token_ids": [list(one.token_ids) for one in found],
            "finish_reason": [one.finish_reason for one in found],
        }

    async def _answer(self, prompt: Any) -> Completion:
        if isinstance(prompt, str):
            return await self._llm.generate(prompt, self._params)
        items = list(prompt)
        if items and isinstance(items[0], dict):
            return await self._llm.chat(items, self._params)
        return await self._llm.generate([int(item) for item in items], self._params)
