"""Harmony, the format of gpt-oss: an answer is messages, each in a channel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.serve.api.tool_calls.bodies import MessageBody
from paceline.serve.api.tool_calls.family import ToolFamily
from paceline.serve.api.tool_calls.lark import escaped, literal
from paceline.serve.conversation import MAX_FUNCTION_CHARS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.api.tool_calls.lark import LarkText
    from paceline.serve.conversation import Tool

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"  # how a message of reasoning begins
HEADERS = (CHANNEL, START, "to=")  # how the header of a message begins
ENDS = (END, CALL, RETURN, START)  # what ends a message; START only by a model's mistake
MAX_MESSAGES = 8  # messages of reasoning before an answer that a grammar holds
_NAMESPACE = "functions."
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(rf"\bto=([\w.-]{{1,{len(_NAMESPACE) + MAX_FUNCTION_CHARS}}})")


@dataclass(frozen=True, slots=True)
class Header:
    """Channel and recipient of a message, as far as they say what it is."""

    kind: Literal["reasoning", "content", "call"]
    function: str = ""  # that the message calls; empty: none

    @classmethod
    def of(cls, text: str) -> Header:
        """Read a header.

        A recipient that is no function is a tool of the model's own: such a message is reasoning.
        """
        channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
        if recipient is not None and recipient[1].startswith(_NAMESPACE):
            return cls("call", recipient[1].removeprefix(_NAMESPACE))
        thinks = recipient is not None or (channel is not None and channel[1] == "analysis")
        return cls("reasoning" if thinks else "content")


class HarmonyCalls(ToolFamily):
    """The family `harmony`."""

    name = "harmony"
    markers = MARKERS
    in_channels = True

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True if the template or the vocabulary has the markers."""
        return ANALYSIS in template or (CHANNEL in tokens and MESSAGE in tokens)

    def body(self, opener: str, tools: Sequence[Tool]) -> CallBody:
        """Return the reader of a message to a function. opener: its header."""
        del tools
        return MessageBody(Header.of(opener).function)

    def calls(self, lark: LarkText, tools: Sequence[Tool], parallel: bool) -> str:
        """Add the rules of one call, which ends an answer, and return their expression.

        The function stands behind the channel or before it; the type of the arguments may be named.
        """
        del parallel
        kind = f'(" "? {lark.mark(CONSTRAIN)} "json" | " json")?'
        choices = []
        for index, tool in enumerate(tools):
            arguments = lark.arguments(f"arguments_{index}", tool)
            to = literal(f"to={_NAMESPACE}{tool.name}")
            head = f'({lark.mark(CHANNEL)} "commentary " {to} | " " {to} {lark.mark(CHANNEL)} "commentary")'
            choices.append(f"{head} {kind} {lark.mark(MESSAGE)} {arguments}")
        return lark.rule("call", " | ".join(choices))

    def written(self, name: str, arguments: str) -> str:
        """Return a call as text."""
        return f"{START}assistant to={_NAMESPACE}{name}{CHANNEL}commentary json{MESSAGE}{arguments}{CALL}"


@dataclass(frozen=True, slots=True)
class ChannelGrammar:
    """Grammar of an answer in channels: reasoning, then a call or the last message."""

    lark: LarkText
    content: str | None  # expression of the last message; None: it is free, and commentary may come before it
    calls: str | None  # expression of a call; None: there are no tools
    must_call: bool = False

    def expression(self, opened: bool) -> str:
        """Return the expression of the answer. opened: the prompt ends inside a message of reasoning."""
        lark = self.lark
        again = f'{lark.until("thoughts", END)} {lark.mark(START)} "assistant"'
        announces = self.content is None and not self.must_call
        channel = '("analysis" | "commentary")' if announces else '"analysis"'
        before = lark.rule("before", f"{lark.mark(CHANNEL)} {channel} {lark.mark(MESSAGE)} {again}")
        ways = [] if self.calls is None else [self.calls]
        if not self.must_call:
            text = self.content or lark.free("PLAIN", [escaped(marker) for marker in MARKERS])
            ways.append(f'{lark.mark(CHANNEL)} "final" {lark.mark(MESSAGE)} {text}')
        begun = f"{again} " if opened else ""
        return f"{begun}{before}{{0,{MAX_MESSAGES}}} ({' | '.join(ways)})"
