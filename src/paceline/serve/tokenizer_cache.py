"""Tokenizer and chat template of the server process, made from what the engine process sent."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import tokenizers

from paceline.core.errors import PacelineError, RequestError
from paceline.core.system import give_memory_back
from paceline.model.tokenizer import Tokenizer
from paceline.serve.chat_options import ChatOptions
from paceline.serve.sandbox.jobs import CheckGrammar, SetTokenizer
from paceline.serve.sandbox.keeper import Sandbox, SandboxedTemplate
from paceline.serve.worker.messages import Language

if TYPE_CHECKING:
    from paceline.core.params import Grammar
    from paceline.model.template_source import TemplateSource
    from paceline.serve.prompts import Prompts
    from paceline.serve.worker.messages import Ready

WARM_UP_TEXT = "Hello"
WARM_UP_GRAMMAR = CheckGrammar("lark", 'start: "a"', with_tokens=False)
NO_LIMIT = 1 << 30  # of tokens
# Comments, texts and regexes; each may end with its line, so that no quote makes the search begin anew.
_LITERAL = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"?|/(?:[^/\\\n]|\\.)*/?')


class TokenizerCache:
    """`Prompts` of the running engine, made in a thread while it loads.

    Making them takes tenths of a second. An engine that restarts with the same model reuses them. Templates and
    grammars each have a process, so that a grammar that takes long holds up no prompt.
    """

    def __init__(self, options: ChatOptions | None = None) -> None:
        self._options = options or ChatOptions()
        self._ready: Ready | None = None
        self._prompts: Prompts | None = None
        self._lock = asyncio.Lock()
        self._expected: tuple[Language, asyncio.Future[Prompts]] | None = None
        self._templates = Sandbox("chat template", param="messages")
        self._grammars = Sandbox("grammar", param="grammar", first=WARM_UP_GRAMMAR)

    async def of(self, ready: Ready) -> Prompts:
        """Return the prompts of the engine that sent `ready`."""
        if ready is self._ready and self._prompts is not None:
            return self._prompts
        async with self._lock:
            if self._prompts is None or self._ready is None or _made_of(ready) != _made_of(self._ready):
                made = await self._made_for(Language.of(ready))
                self._prompts = replace(
                    made, max_len=ready.max_len, vocab_size=ready.vocab_size, sampling=ready.sampling
                )
            self._ready = ready
            return self._prompts

    def expect(self, language: Language) -> None:
        """Begin to make what `of` will need, while the engine loads."""
        if self._ready is not None and language == Language.of(self._ready):
            return  # a restarted engine of the same model
        made = asyncio.ensure_future(asyncio.to_thread(self._made, language))
        made.add_done_callback(lambda done: done.cancelled() or done.exception())  # `of` raises it
        self._expected = language, made
        asyncio.get_running_loop().run_in_executor(None, self._start_template, language)

    def _start_template(self, language: Language) -> None:
        with suppress(PacelineError):  # `of` raises it
            self._template(language.template)

    async def _made_for(self, language: Language) -> Prompts:
        """Return prompts made ahead or now."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] == language:
            return await expected[1]
        return await asyncio.to_thread(self._made, language)

    def _template(self, own: TemplateSource | None) -> SandboxedTemplate | None:
        source = self._options.source(own)
        return None if source is None else SandboxedTemplate(source, self._templates)

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise `RequestError` for a grammar that the engine would refuse. Blocks."""
        ready = self._ready
        assert ready is not None
        names_tokens = grammar.kind == "lark" and "<" in _LITERAL.sub("", grammar.text)
        if names_tokens:
            self._grammars.setup(SetTokenizer(ready.tokenizer_json, ready.eos_ids, ready.bos_id))
        self._grammars.call(CheckGrammar(grammar.kind, grammar.text, names_tokens))

    def close(self) -> None:
        """End the processes."""
        self._templates.close()
        self._grammars.close()

    def _made(self, language: Language) -> Prompts:
        """Return prompts for an engine whose limits are not known yet."""
        raw = tokenizers.Tokenizer.from_buffer(language.tokenizer_json)
        tokenizer = Tokenizer(raw, eos_ids=language.eos_ids, bos_id=language.bos_id)
        prompts = self._options.prompts(tokenizer, self._template(language.template), NO_LIMIT, None, sampling={})
        _warm_up(prompts)
        give_memory_back()
        return prompts


def _made_of(ready: Ready) -> tuple[object, ...]:
    """Return what prompts are made of; replicas of one model differ in other things."""
    return Language.of(ready), ready.max_len, ready.vocab_size, ready.sampling


def _warm_up(prompts: Prompts) -> None:
    """Use tokenizer and template once, so that the first request finds them warm."""
    try:
        prompts.of_text(WARM_UP_TEXT)
        if prompts.template is not None:
            prompts.of_messages([{"role": "user", "content": WARM_UP_TEXT}])
    except RequestError:
        pass  # a template may refuse any conversation, and a context may be too short for one
