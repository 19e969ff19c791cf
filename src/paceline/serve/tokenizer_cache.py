"""Tokenizer and chat template of the server process, made from what the engine process sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import tokenizers

from paceline.core.errors import RequestError
from paceline.model.template import ChatTemplate, TemplateSource
from paceline.model.tokenizer import Tokenizer
from paceline.serve.prompts import Prompts

if TYPE_CHECKING:
    from paceline.serve.worker.messages import Ready

WARM_UP_TEXT = "Hello"


class TokenizerCache:
    """`Prompts` of the running engine, made in a thread from its `Ready` message.

    Making them takes tenths of a second. An engine that restarts with the same model reuses them.
    """

    def __init__(self) -> None:
        self._ready: Ready | None = None
        self._prompts: Prompts | None = None
        self._lock = asyncio.Lock()

    async def of(self, ready: Ready) -> Prompts:
        """Return the prompts of the engine that sent `ready`."""
        if ready is self._ready and self._prompts is not None:
            return self._prompts
        async with self._lock:
            if self._prompts is None or ready != self._ready:
                self._prompts = await asyncio.to_thread(_prompts, ready)
            self._ready = ready
            return self._prompts


def _prompts(ready: Ready) -> Prompts:
    raw = tokenizers.Tokenizer.from_str(ready.tokenizer_json)
    tokenizer = Tokenizer(raw, eos_ids=ready.eos_ids, bos_id=ready.bos_id)
    source = ready.template
    template = None if source is None else ChatTemplate(TemplateSource(source.source, source.tokens))
    prompts = Prompts(tokenizer, template, ready.max_len, ready.vocab_size, sampling=ready.sampling)
    _warm_up(prompts)
    return prompts


def _warm_up(prompts: Prompts) -> None:
    """Use tokenizer and template once, so that the first request finds them warm."""
    try:
        prompts.of_text(WARM_UP_TEXT)
        if prompts.template is not None:
            prompts.of_messages([{"role": "user", "content": WARM_UP_TEXT}])
    except RequestError:
        pass  # a template may refuse any conversation, and a context may be too short for one
