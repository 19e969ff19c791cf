"""Chat templates: Jinja in a sandbox that can neither change anything nor run away."""

from __future__ import annotations

import json
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.core.errors import BadModelFile, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.parser import Parser

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 1 << 26
MAX_REPEAT = 1 << 16  # of a text by a number
MAX_RENDER_S = 10.0
_deadline_s: ContextVar[float] = ContextVar("_deadline_s")  # of the rendering under way, on the monotonic clock
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")


class _Generation(Extension):
    """`{% generation %}` marks answers for training; when rendering it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Clock(Extension):
    """Looks at the clock in every round of a loop and call of a macro: they may run for long without a word."""

    def watch(self, template: nodes.Template) -> nodes.Template:
        """Return the template with a look at the clock before what may be done over and over."""
        repeating: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
        for repeated in repeating:
            repeated.body.insert(0, nodes.ExprStmt(self.call_method("tick"), lineno=repeated.lineno))
        return template.set_environment(self.environment)  # type: ignore[return-value]

    def tick(self) -> None:
        """Raise `RequestError` after the deadline."""
        if time.monotonic() > _deadline_s.get():
            _raise_endless()


class _Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, with the operators that could fill memory at a stroke held back."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse powers, wide formats, and long repeats of sequences."""
        numbers = all(isinstance(v, int | float) for v in (left, right))
        if operator == "**" or (operator == "%" and not numbers and _WIDE_FORMAT.search(str(left))):
            raise SecurityError(f"a chat template may not use {operator} here")
        if operator == "*" and not numbers and max(v for v in (left, right, 0) if isinstance(v, int)) > MAX_REPEAT:
            raise SecurityError("a chat template repeats a text too often")
        return super().call_binop(context, operator, left, right)


def _raise_endless() -> NoReturn:
    raise RequestError("the model's chat template does not come to an end", "messages")


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """JSON as transformers renders it: no HTML escapes, no ASCII escapes."""
    return json.dumps(value, ensure_ascii=False, indent=min(indent, 16) if indent is not None else None)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Clock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template's text and the special tokens it may name."""

    text: str
    special: Mapping[str, str]  # bos_token, eos_token ... -> text


class ChatTemplate:
    """One model's way of writing a conversation down as a prompt."""

    def __init__(self, source: TemplateSource) -> None:
        """Compile the template. Raises `BadModelFile` if it is not valid Jinja."""
        if len(source.text) > MAX_TEMPLATE_CHARS:
            raise BadModelFile("the model's chat template is longer than any real one")
        try:
            environment = _environment()
            clock = _Clock(environment)
            self._template = environment.from_string(clock.watch(environment.parse(source.text)))
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise BadModelFile(f"the model's chat template is not valid: {str(error)[:200]}") from None
        self.source = source
        self._special = dict(source.special)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return the prompt. Raises `RequestError` if the template refuses the messages."""
        try:
            return self._render(messages, add_generation_prompt)
        except RequestError:
            raise
        except Exception as error:
            # A template is a program of the model's author: it may raise anything, and only this request fails.
            what = str(error)[:200] or type(error).__name__
            raise RequestError(f"the model's chat template refuses these messages: {what}", "messages") from None

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        deadline_s = time.monotonic() + MAX_RENDER_S
        before = _deadline_s.set(deadline_s)
        try:
            return self._joined(messages, add_generation_prompt, deadline_s)
        finally:
            _deadline_s.reset(before)

    def _joined(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, deadline_s: float
    ) -> str:
        pieces: list[str] = []
        num_chars = 0
        values = {**self._special, "messages": messages, "tools": None, "documents": None}
        for piece in self._template.generate(**values, add_generation_prompt=add_generation_prompt):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS or time.monotonic() > deadline_s:
                _raise_endless()
        return "".join(pieces)
