"""Structured output in the words of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from paceline.core.errors import QueueFull, RequestError
from paceline.core.params import MAX_GRAMMAR_CHARS, MAX_GRAMMAR_CHOICES, Grammar
from paceline.serve.api.fields import MAX_MESSAGE_CHARS, read_once
from paceline.serve.sandbox.keeper import MAX_WAITING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Way = tuple[str, Any, Callable[[Any], Grammar | None]]  # a field, its value, and the grammar of a value

MAX_TAGS = 64
MAX_CHECKED = 256  # grammars remembered as good
MAX_GBNF_CHARS = 64 << 10  # converting chains of rules takes time that grows as their square: 2 s
_LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:(?!:=))")  # llguidance's mark of Lark, in linear time

Text = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]
Short = Annotated[str, Meta(max_length=1024)]
JsonSchema = dict[str, Any] | bool | Text
Choices = Annotated[list[Short], Meta(max_length=MAX_GRAMMAR_CHOICES)]


class _NamedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """The schema of a response format; strict or not, every answer fits it."""

    name: Short | None = None
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    schema: JsonSchema | None = None
    strict: bool | None = None


class _Structure(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a structural tag: text from `begin` to `end` fits a schema."""

    begin: Short
    schema: dict[str, Any]
    end: Short


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`; `schema` beside json_object is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: _NamedSchema | None = None
    schema: JsonSchema | None = None
    structures: Annotated[list[_Structure], Meta(max_length=MAX_TAGS)] | None = None
    triggers: Annotated[list[Short], Meta(max_length=MAX_TAGS)] | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar asked for; None for text. Raises `RequestError`."""
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            return _tags(self.structures or [], self.triggers or [])
        named = None if self.json_schema is None else self.json_schema.schema
        schema = self.schema if named is None else named
        if self.type == "json_schema" and schema is None:
            raise RequestError("response_format of type json_schema needs json_schema.schema", "response_format")
        return Grammar.json_object() if schema is None else Grammar.json_schema(schema)


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`."""

    json: JsonSchema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: ResponseFormat | Text | None = None  # vLLM takes it as JSON text
    # Accepted without effect: white space is fixed, and nothing falls back to another library.
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    whitespace_pattern: Short | None = None
    disable_additional_properties: bool | None = None  # true is refused
    backend: Short | None = field(default=None, name="_backend")

    def grammar_asked(self) -> Grammar | None:
        """Return the grammar asked for. Raises `RequestError`."""
        if self.disable_additional_properties:
            raise RequestError("write additionalProperties: false into the schema itself", "structured_outputs")
        ways: list[Way] = [
            ("json", self.json, Grammar.json_schema),
            ("regex", self.regex, Grammar.regex),
            ("choice", self.choice, Grammar.choice),
            ("grammar", self.grammar, from_grammar),
            ("json_object", self.json_object or None, lambda _: Grammar.json_object()),
            ("structural_tag", self.structural_tag, _from_tag),
        ]
        found = _only("structured_outputs", ways)
        return None if found is None else found[0]


class StructuredFields(Struct, frozen=True, kw_only=True, dict=True):
    """Fields of a body that ask for structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_decoding_backend: Short | None = None  # accepted without effect
    guided_whitespace_pattern: Short | None = None  # likewise: white space is fixed
    json_schema: JsonSchema | None = None  # of llama.cpp
    grammar: Text | None = None  # of llama.cpp

    @cached_property
    def structure(self) -> tuple[Grammar, str] | None:
        """The grammar asked for, and by which field. Raises `RequestError`."""
        ways: list[Way] = [
            ("response_format", self.response_format, ResponseFormat.grammar),
            ("structured_outputs", self.structured_outputs, StructuredOutputs.grammar_asked),
            ("guided_json", self.guided_json, Grammar.json_schema),
            ("guided_regex", self.guided_regex, Grammar.regex),
            ("guided_choice", self.guided_choice, Grammar.choice),
            ("guided_grammar", self.guided_grammar, from_grammar),
            ("json_schema", self.json_schema, Grammar.json_schema),
            ("grammar", self.grammar or None, from_grammar),  # llama.cpp's clients send ""
        ]
        return _only("structured output", ways)


_ESCAPE = b"\\u00"  # escape with which a body may spell the name of a field
_ASKING = (_ESCAPE, *(name.encode() for name in StructuredFields.__struct_fields__))


def may_ask_structure(data: bytes) -> bool:
    """Return False for a body that surely asks for no structure."""
    return any(name in data for name in _ASKING)


def _only(what: str, ways: Sequence[Way]) -> tuple[Grammar, str] | None:
    """Return the one grammar asked for, and its field. Raises `RequestError` that names the field."""
    found = []
    for name, value, make in ways:
        try:
            grammar = None if value is None else make(value)
        except RequestError as error:
            raise RequestError(str(error), name) from None
        if grammar is not None:
            found.append((grammar, name))
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise RequestError(f"{what} is asked for by {names}; send one of them", found[0][1])
    return found[0] if found else None


def from_grammar(text: str) -> Grammar:
    """Return the grammar of Lark or GBNF text. Raises `RequestError`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _LARK.search(text):
        return Grammar.lark(text)
    if len(text) > MAX_GBNF_CHARS:
        raise RequestError(f"a grammar in GBNF may have {MAX_GBNF_CHARS} characters; send it in Lark", "grammar")
    try:
        lark = gbnf_to_lark(text)
    except RecursionError:
        raise RequestError("the grammar is nested too deeply", "grammar") from None
    except Exception as error:
        raise RequestError(
            f"the grammar is neither Lark nor GBNF: {str(error)[:MAX_MESSAGE_CHARS]}", "grammar"
        ) from None
    return Grammar.lark(lark)


def _from_tag(given: ResponseFormat | str) -> Grammar | None:
    try:
        form = msgspec.json.decode(given, type=read_once(ResponseFormat)) if isinstance(given, str) else given
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(
            f"this is no structural tag: {str(error)[:MAX_MESSAGE_CHARS]}", "structural_tag"
        ) from None
    return form.grammar()


def _tags(structures: list[_Structure], triggers: list[str]) -> Grammar:
    """Return the grammar of free text in which some parts fit schemas."""
    from llguidance import StructTag

    tags = []
    for one in structures:
        trigger = next((t for t in triggers if t and one.begin.startswith(t)), None)
        if trigger is None:
            raise RequestError(f"no trigger begins the structural tag {one.begin!r}", "response_format")
        tags.append(StructTag(trigger=trigger, begin=one.begin, grammar=one.schema, end=one.end))
    if not tags:
        raise RequestError("a structural tag needs structures", "response_format")
    return Grammar.lark(StructTag.to_grammar(tags, assume_special=False))


class GrammarChecks:
    """Checks of grammars in one thread; those that passed are remembered."""

    def __init__(self) -> None:
        self._good: OrderedDict[Grammar, None] = OrderedDict()
        self._open: dict[Grammar, asyncio.Future[None]] = {}  # requests of one grammar wait for the same check
        self._thread = ThreadPoolExecutor(1, "grammar")

    async def check(
        self, grammars: Iterable[Grammar | None], check: Callable[[Grammar], None], field_name: str
    ) -> None:
        """Raise `RequestError` for a grammar that the engine would refuse, or `QueueFull`.

        check: called in a thread. field_name: of the body.
        """
        for grammar in {g for g in grammars if g is not None} - self._good.keys():
            try:
                await asyncio.shield(self._open.get(grammar) or self._begun(grammar, check))
            except RequestError as error:
                raise type(error)(str(error), field_name) from None

    def _begun(self, grammar: Grammar, check: Callable[[Grammar], None]) -> asyncio.Future[None]:
        if len(self._open) == MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} grammars wait to be checked already; try again later")
        begun = asyncio.get_running_loop().run_in_executor(self._thread, check, grammar)
        begun.add_done_callback(partial(self._end, grammar))
        self._open[grammar] = begun
        return begun

    def _end(self, grammar: Grammar, done: asyncio.Future[None]) -> None:
        del self._open[grammar]
        if not done.cancelled() and done.exception() is None:
            self._good[grammar] = None
            if len(self._good) > MAX_CHECKED:
                self._good.popitem(last=False)
