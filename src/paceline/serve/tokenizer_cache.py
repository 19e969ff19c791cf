"""The server's own tokenizer and template, made from what the engine process sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import tokenizers

from paceline.model.template import ChatTemplate, TemplateSource
from paceline.model.tokenizer import Tokenizer
from paceline.serve.prompts import Prompts

if TYPE_CHECKING:
    from paceline.serve.worker.messages import Ready


class TokenizerCache:
    """Makes `Prompts` from a `Ready` message, in a thread and once for each engine that became ready."""

    def __init__(self) -> None:
        self._ready: Ready | None = None
        self._prompts: Prompts | None = None
        self._lock = asyncio.Lock()

    async def of(self, ready: Ready) -> Prompts:
        """Return the prompts of the engine that said this."""
        if ready is self._ready and self._prompts is not None:
            return self._prompts
        async with self._lock:
            if ready is not self._ready or self._prompts is None:
                self._prompts = await asyncio.to_thread(_prompts, ready)
                self._ready = ready
            return self._prompts


def _prompts(ready: Ready) -> Prompts:
    raw = tokenizers.Tokenizer.from_str(ready.tokenizer_json)
    tokenizer = Tokenizer(raw, eos_ids=ready.eos_ids, bos_id=ready.bos_id)
    source = ready.template
    template = None if source is None else ChatTemplate(TemplateSource(source.source, source.tokens))
    return Prompts(tokenizer, template, ready.max_len, ready.vocab_size)
