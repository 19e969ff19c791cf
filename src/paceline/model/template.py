"""Chat templates: Jinja in an immutable sandbox with limits of time and memory."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sized
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.core.errors import BadModelFile, RequestError
from paceline.model.template_source import MAX_TEMPLATE_CHARS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser
    from jinja2.runtime import Context

    from paceline.model.template_source import TemplateSource

MAX_OUTPUT_CHARS = 1 << 26
MAX_REPEAT = 1 << 16  # most repeats of a text
MAX_JSON_GAP = 16  # most characters between values in JSON, or before them
MAX_RENDER_S = 10.0
_deadline_s: ContextVar[float] = ContextVar("_deadline_s")  # of the current rendering, monotonic clock
_PADDING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_WIDE_FIELD = re.compile(r":[^}]*(\d{5}|\{)")  # a field of `format` that is wide, or takes its width from another
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")


class _Generation(Extension):
    """Tag `{% generation %}`, which marks answers for training and renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Deadline(Extension):
    """Deadline check in every iteration of a loop and call of a macro.

    Loops and macros may run for long without output; output is checked elsewhere.
    """

    def watch(self, template: nodes.Template) -> nodes.Template:
        """Return the template with a deadline check in everything that repeats."""
        repeating: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
        for repeated in repeating:
            repeated.body.insert(0, nodes.ExprStmt(self.call_method("tick"), lineno=repeated.lineno))
        return template.set_environment(self.environment)  # type: ignore[return-value]

    def tick(self) -> None:
        """Raise `RequestError` after the deadline."""
        if time.monotonic() > _deadline_s.get():
            _raise_endless()


class _Sandbox(ImmutableSandboxedEnvironment):
    """Immutable sandbox without the operators that could fill memory at once."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as there
        """Refuse methods that would pad a text or a number very wide."""
        name, text = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if name in _PADDING and isinstance(text, str):
            _check_widths(text, args, kwargs)
        if name in ("format", "format_map"):
            written = getattr(getattr(__obj, "__wrapped__", None), "__self__", "")
            if _WIDE_FIELD.search(str(written)):
                raise SecurityError("a chat template pads a text too far")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse powers, wide formats, and long repeats of sequences."""
        numbers = all(isinstance(v, int | float) for v in (left, right))
        if operator == "**" or (operator == "%" and not numbers and _WIDE_FORMAT.search(str(left))):
            raise SecurityError(f"a chat template may not use {operator} here")
        if operator == "*" and not numbers:
            times = max(v for v in (left, right, 0) if isinstance(v, int))
            length = max((len(v) for v in (left, right) if isinstance(v, Sized)), default=0)
            if times > MAX_REPEAT or times * length > MAX_OUTPUT_CHARS:
                raise SecurityError("a chat template repeats a text too often")
        return super().call_binop(context, operator, left, right)


def _check_widths(text: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise `SecurityError` if padding every line and tab of a text could fill memory."""
    places = max(len(text.splitlines()) + text.count("\t"), 1) if isinstance(text, str) else 1
    for given in (*args, *kwargs.values()):
        width = len(given) if isinstance(given, str) else given  # `indent` takes either
        if isinstance(width, int) and (width > MAX_REPEAT or width * places > MAX_OUTPUT_CHARS):
            raise SecurityError("a chat template pads a text too far")


def _with_widths_checked(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks the widths among its arguments, the first excepted."""

    @wraps(filter_)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_widths(args[0], args[1:], kwargs)
        return filter_(*args, **kwargs)

    return checked


def _format(text: object, *args: Any, **kwargs: Any) -> Any:
    """Jinja's filter `format`, with the same limit as the operator %."""
    if _WIDE_FORMAT.search(str(text)):
        raise SecurityError("a chat template pads a text too far")
    return FILTERS["format"](text, *args, **kwargs)


def _raise_endless() -> NoReturn:
    raise RequestError("the model's chat template does not come to an end", "messages")


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers writes it: no HTML escapes, ASCII escapes only if asked for."""
    if (indent or 0) > MAX_JSON_GAP or any(len(text) > MAX_JSON_GAP for text in separators or ()):
        raise SecurityError("a chat template pads a text too far")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Deadline, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.filters["format"] = _format
    for name in ("center", "indent", "batch", "slice", "round"):
        environment.filters[name] = _with_widths_checked(FILTERS[name])
    del environment.globals["lipsum"]  # no template needs these; they may take any time
    for name in ("pprint", "urlize", "wordwrap"):
        del environment.filters[name]
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class ChatTemplate:
    """Chat template of one model: conversation to prompt."""

    def __init__(self, source: TemplateSource) -> None:
        """Compile the template. Raises `BadModelFile` if it is not valid Jinja."""
        if len(source.text) > MAX_TEMPLATE_CHARS:
            raise BadModelFile("the model's chat template is longer than any real one")
        try:
            environment = _environment()
            deadline = _Deadline(environment)
            self._template = environment.from_string(deadline.watch(environment.parse(source.text)))
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise BadModelFile(f"the model's chat template is not valid: {str(error)[:200]}") from None
        self.source = source
        self._special = dict(source.special)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **values: Any
    ) -> str:
        """Return the prompt. values: further variables of the template.

        Raises `RequestError` if the template refuses the messages.
        """
        given = {"tools": None, "documents": None, **values, **self._special, "messages": messages}
        try:
            return self._render({**given, "add_generation_prompt": add_generation_prompt})
        except RequestError:
            raise
        except Exception as error:
            # A template is a program of the model's author: it may raise anything, and only this request fails.
            what = str(error)[:200] or type(error).__name__
            raise RequestError(f"the model's chat template refuses these messages: {what}", "messages") from None

    def render_all(self, asked: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the prompt of each mapping of variables. Raises as `render`."""
        return [self.render(**values) for values in asked]

    def _render(self, values: Mapping[str, Any]) -> str:
        deadline_s = time.monotonic() + MAX_RENDER_S
        before = _deadline_s.set(deadline_s)
        try:
            return self._joined(values, deadline_s)
        finally:
            _deadline_s.reset(before)

    def _joined(self, values: Mapping[str, Any], deadline_s: float) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(values):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS or time.monotonic() > deadline_s:
                _raise_endless()
        return "".join(pieces)


def compiled(source: TemplateSource | None) -> ChatTemplate | None:
    """Return a model's chat template, if it has one. Raises `BadModelFile`."""
    return None if source is None else ChatTemplate(source)
