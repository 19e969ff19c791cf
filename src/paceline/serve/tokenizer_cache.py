"""Tokenizer and chat template of the server process, made from what the engine process sent."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import tokenizers

from paceline.core.errors import PacelineError, RequestError
from paceline.model.template import TemplateSource
from paceline.model.tokenizer import Tokenizer
from paceline.serve.chat_options import ChatOptions
from paceline.serve.sandbox.jobs import CheckGrammar, SetTokenizer
from paceline.serve.sandbox.keeper import Sandbox, SandboxedTemplate

if TYPE_CHECKING:
    from paceline.core.params import Grammar
    from paceline.serve.prompts import Prompts
    from paceline.serve.worker.messages import Language, Ready, Template

WARM_UP_TEXT = "Hello"
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\\n]|\\.)+/')


class TokenizerCache:
    """`Prompts` of the running engine, made in a thread from its `Ready` message.

    Making them takes tenths of a second. An engine that restarts with the same model reuses them. Templates and
    grammars each have a process, so that a grammar that takes long holds up no prompt.
    """

    def __init__(self, options: ChatOptions | None = None) -> None:
        self._options = options or ChatOptions()
        self._ready: Ready | None = None
        self._prompts: Prompts | None = None
        self._lock = asyncio.Lock()
        self._expected: tuple[str, asyncio.Future[tokenizers.Tokenizer]] | None = None
        self._templates = Sandbox("chat template", param="messages")
        self._grammars = Sandbox("grammar", param="grammar")

    async def of(self, ready: Ready) -> Prompts:
        """Return the prompts of the engine that sent `ready`."""
        if ready is self._ready and self._prompts is not None:
            return self._prompts
        async with self._lock:
            if self._prompts is None or self._ready is None or _language(ready) != _language(self._ready):
                raw = await self._raw(ready.tokenizer_json)
                self._prompts = await asyncio.to_thread(self._made, ready, raw)
            self._ready = ready
            return self._prompts

    def expect(self, language: Language) -> None:
        """Begin to make what `of` will need, while the engine loads."""
        text = language.tokenizer_json
        made = asyncio.ensure_future(asyncio.to_thread(tokenizers.Tokenizer.from_str, text))
        made.add_done_callback(lambda done: done.cancelled() or done.exception())  # `of` tells of it
        self._expected = text, made
        asyncio.get_running_loop().run_in_executor(None, self._start_template, language)

    def _start_template(self, language: Language) -> None:
        with suppress(PacelineError):  # `of` tells of it
            self._template(language.template)

    async def _raw(self, text: str) -> tokenizers.Tokenizer:
        """Return the library's tokenizer, made ahead or now."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] == text:
            return await expected[1]
        return await asyncio.to_thread(tokenizers.Tokenizer.from_str, text)

    def _template(self, own: Template | None) -> SandboxedTemplate | None:
        source = self._options.source(None if own is None else TemplateSource(own.source, own.tokens))
        return None if source is None else SandboxedTemplate(source, self._templates)

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise `RequestError` for a grammar that the engine would refuse. Blocks."""
        ready = self._ready
        assert ready is not None
        names_tokens = grammar.kind == "lark" and "<" in _LITERAL.sub("", grammar.text)
        if names_tokens:
            self._grammars.setup(SetTokenizer(ready.tokenizer_json, ready.eos_ids, ready.bos_id, ready.vocab_size))
        self._grammars.call(CheckGrammar(grammar.kind, grammar.text, names_tokens))

    def close(self) -> None:
        """End the processes."""
        self._templates.close()
        self._grammars.close()

    def _made(self, ready: Ready, raw: tokenizers.Tokenizer) -> Prompts:
        tokenizer = Tokenizer(raw, eos_ids=ready.eos_ids, bos_id=ready.bos_id)
        template = self._template(ready.template)
        prompts = self._options.prompts(
            tokenizer, template, ready.max_len, ready.vocab_size, sampling=ready.sampling
        )
        _warm_up(prompts)
        return prompts


def _language(ready: Ready) -> tuple[object, ...]:
    """Return what prompts are made of; replicas of one model differ in other things."""
    ids = ready.eos_ids, ready.bos_id, ready.max_len, ready.vocab_size
    return ready.tokenizer_json, ready.template, ready.sampling, *ids


def _warm_up(prompts: Prompts) -> None:
    """Use tokenizer and template once, so that the first request finds them warm."""
    try:
        prompts.of_text(WARM_UP_TEXT)
        if prompts.template is not None:
            prompts.of_messages([{"role": "user", "content": WARM_UP_TEXT}])
    except RequestError:
        pass  # a template may refuse any conversation, and a context may be too short for one
