"""Grammars and readers that a conversation's tools and reasoning ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import RequestError
from paceline.core.params import MAX_GRAMMAR_CHARS, Grammar
from paceline.model.grammar import json_source
from paceline.serve.api.tool_calls.harmony import ChannelGrammar, HarmonyCalls
from paceline.serve.api.tool_calls.lark import MAX_CALLS, LarkText, escaped, literal
from paceline.serve.api.tool_calls.reader import ReaderPlan
from paceline.serve.api.tool_calls.scan import NAME_REGEX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.model.tokenizer import Tokenizer
    from paceline.serve.api.tool_calls.family import ToolFamily
    from paceline.serve.api.tool_calls.reasoning import ReasoningMarks
    from paceline.serve.conversation import ToolUse

_GAP = '("\\n" | "\\n\\n")?'
_TAIL = r"/[ \t\r\n`\]}]{0,40}/"  # what may stand behind the only call: the end of text around it


@dataclass(frozen=True, slots=True, eq=False)
class AnswerForms:
    """Forms in which one model writes calls and reasoning."""

    tokenizer: Tokenizer
    family: ToolFamily
    marks: ReasoningMarks | None
    special: Mapping[str, int]  # text -> id of the tokens that grammars name by id

    @property
    def in_channels(self) -> bool:
        """True if answers are runs of messages, see `harmony`."""
        return self.family.in_channels or (self.marks is not None and self.marks.in_channels)

    def reader_plan(self, use: ToolUse | None, opened: bool, continues: bool = False) -> ReaderPlan | None:
        """Return the plan of answers' readers; None if every answer is plain text.

        opened: the prompt ends inside reasoning. continues: it ends inside a text, which the answer continues.
        """
        tools = () if use is None else use.callable
        if not tools and self.marks is None and not self.in_channels:
            return None
        family = self.family if tools else None
        return ReaderPlan(self.tokenizer, family, tools, self.marks, opened, continues, self.in_channels)

    def grammar(self, use: ToolUse | None, content: Grammar | None, opened: bool) -> Grammar | None:
        """Return the grammar of an answer; None if it is free.

        content: grammar of the answer's own text. opened: the prompt ends inside the reasoning.
        """
        tools = () if use is None else use.callable
        if not tools and (content is None or (self.marks is None and not self.in_channels)):
            return content
        lark = LarkText(self.special)
        answer = _content(lark, content) if content is not None else None
        if self.in_channels:
            lark.rule("start", self._channels(lark, use, answer, opened))
            return _checked(lark.text(), "tools" if tools else "structured_outputs")
        if use is not None and tools:
            answer = self._with_calls(lark, use, answer)
        assert answer is not None
        free = content is None and use is not None and use.choice == "auto"
        lark.rule("start", self._behind_reasoning(lark, answer, opened, free))
        return _checked(lark.text(), "tools" if tools else "structured_outputs")

    def _channels(self, lark: LarkText, use: ToolUse | None, content: str | None, opened: bool) -> str:
        """Return the expression of an answer in channels."""
        tools = () if use is None else use.callable
        calls = HarmonyCalls().calls(lark, tools, parallel=False) if tools else None
        must_call = use is not None and bool(tools) and use.choice != "auto"
        return ChannelGrammar(lark, content, calls, must_call).expression(opened)

    def _with_calls(self, lark: LarkText, use: ToolUse, content: str | None) -> str:
        """Return the expression of an answer that may or must call tools."""
        family = self.family
        calls = family.calls(lark, use.callable, use.parallel)
        opener = family.openers[0] if family.openers else None
        begun = calls if family.bare_first or opener is None else f"{lark.mark(opener)} {calls}"
        if use.choice != "auto":
            return begun
        if content is not None:
            return f"({content} | {begun})"
        return self._free_or_calls(lark, use, calls)

    def _free_or_calls(self, lark: LarkText, use: ToolUse, calls: str) -> str:
        """Return the expression of free text that may end in calls.

        Parts that may begin at the same place must differ in text: the lexer reads on while any of them may match.
        """
        family = self.family
        not_first = self.marks.open if self.marks else None
        excluded = [escaped(opener) for opener in family.openers]
        if family.bare_key is not None:
            excluded.append(NAME_REGEX)
        plain = lark.free("PLAIN", excluded, not_first)
        ways = [plain]
        if family.openers and family.openers[0] in lark.tokens:
            ways.append(f"{plain} {lark.mark(family.openers[0])} {calls}")
        elif family.openers:
            ways.append(f"{lark.until_match('opened', escaped(family.openers[0]), not_first)} {calls}")
        free = f"({' | '.join(ways)})"
        if family.bare_key is None:
            return free
        call, other = _bare_calls(lark, use, family.bare_key, not_first)
        if not use.parallel:
            return f"({other})* ({free} | {call} {_TAIL})"
        return f"({other})* ({call} ({call} | {other}){{0,{MAX_CALLS}}})? {free}"

    def _behind_reasoning(self, lark: LarkText, answer: str, opened: bool, free: bool) -> str:
        """Return the expression of an answer with the reasoning before it.

        free: the answer may be any text, so white space may stand before the marker as well.
        """
        if self.marks is None:
            return answer
        thoughts = f"{lark.until('thoughts', self.marks.close)} {_GAP}"
        if opened:
            return f"{thoughts} {answer}"
        opener = lark.mark(self.marks.open)
        if free:
            known = self.marks.open in lark.tokens
            opener = f"/\\s*/ {opener}" if known else f"/\\s*{escaped(self.marks.open)}/"
        return f"({opener} {thoughts})? {answer}"


def _checked(text: str, param: str) -> Grammar:
    """Return the grammar of a text. Raises `RequestError` that names a field of the body."""
    if len(text) > MAX_GRAMMAR_CHARS:
        what = "schemas of the tools" if param == "tools" else "grammars"
        raise RequestError(f"{what} are too long: together they may have {MAX_GRAMMAR_CHARS} characters", param)
    return Grammar("lark", text)


def _bare_calls(lark: LarkText, use: ToolUse, key: str, not_first: str | None) -> tuple[str, str]:
    """Add the rules of objects in free text; return those of calls and other objects."""
    lark.rule("GAP", r"/[ \t\r\n]{0,40}/")
    lark.until_match("named", NAME_REGEX, not_first)
    choices = []
    for index, tool in enumerate(use.callable):
        arguments = lark.arguments(f"loose_{index}", tool, loose=True)
        name, keyed = literal(f'{tool.name}"'), literal(f'"{key}"')
        choices.append(f'{name} GAP "," GAP {keyed} GAP ":" GAP {arguments}')
    names = "|".join(escaped(tool.name) for tool in use.callable)
    lark.rule("OTHER", f'/[^"]*"/ & ~/({names})"/')
    call = lark.rule("bare", f'named ({" | ".join(choices)}) GAP "}}"')
    return call, lark.rule("other", "named OTHER")


def _content(lark: LarkText, grammar: Grammar) -> str:
    """Add a grammar of an answer's own text to another; return the expression."""
    if grammar.kind == "json_schema":
        return lark.rule("content", f"%json {json_source(grammar.text)}")
    if grammar.kind == "regex":
        pattern = grammar.text.replace("\n", "\\n")
        return lark.rule("CONTENT", "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern) + "/")
    return lark.rule("content", f"%lark {{\n{grammar.text}\n}}")  # names of the inner grammar do not meet ours
