"""Users' text kept from becoming control tokens of the model."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MARKS = [chr(code) for code in range(0xE000, 0xE400)]  # private use: no text should hold them
_BRACKETED = re.compile(r"[<\[]\S+[>\]]")
_PLAIN = "\u00b7"  # stands for the second character of a control token if it cannot be marked
MAX_GROUPING = 64  # first characters by which texts are grouped


@dataclass(frozen=True, slots=True)
class GuardedValues:
    """Variables of a template, in which users' text holds no control token."""

    asked: tuple[Mapping[str, Any], ...]  # with marks; then, if any, with control tokens replaced
    mark: str = ""  # stands within control tokens of users' text; empty: there were none


class ControlGuard:
    """Finder of control tokens in the text of users.

    Control tokens are those that the tokenizer calls special, and others in brackets that the template itself
    writes, such as `<tool_response>`; an assistant's text may hold the latter.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        added = tokenizer.raw.get_added_tokens_decoder().values()
        texts = {t.content for t in added if len(t.content) > 1}
        special = {t.content for t in added if t.special} & texts
        written = {t for t in texts - special if _BRACKETED.fullmatch(t) and t in template}
        self._of_assistant = _any_of(special)
        self._of_others = _any_of(special | written)
        self._warned = False

    def guarded(self, values: Mapping[str, Any]) -> GuardedValues:
        """Return variables of a template with the control tokens of users' text taken apart."""
        texts, found = list[str](), list[str]()

        def plain(second: str) -> str:
            found.append(second)
            return _PLAIN

        replaced = self._changed(values, plain, texts)
        if not found:
            return GuardedValues((values,))
        joined = "".join(texts)
        mark = next((mark for mark in _MARKS if mark not in joined), "")
        if not mark:
            return GuardedValues((replaced,))
        return GuardedValues((self._changed(values, lambda char: mark + char, []), replaced), mark)

    def chosen(self, guarded: GuardedValues, texts: Sequence[str]) -> tuple[str, int]:
        """Return the marked text if all marks are kept, else the other; and its index."""
        if not guarded.mark or self._count(texts[0]) == self._count(texts[1]):
            return texts[0], 0
        if not self._warned:
            self._warned = True
            log.warning("the chat template drops marks in users' text; control tokens there are replaced instead")
        return texts[1], 1

    def _count(self, text: str) -> int:
        return sum(1 for _ in self._of_others.finditer(text))

    def _changed(
        self, values: Mapping[str, Any], change: Callable[[str], str], texts: list[str]
    ) -> dict[str, Any]:
        """Return variables with the second character of every control token changed.

        texts: gets every text among them.
        """

        def of(value: Any, of_assistant: bool) -> Any:
            if isinstance(value, str):
                texts.append(value)
                return _each_changed(self._of_assistant if of_assistant else self._of_others, value, change)
            if isinstance(value, Mapping):
                return {of(k, False): of(v, of_assistant) for k, v in value.items()}
            return [of(each, of_assistant) for each in value] if isinstance(value, list | tuple) else value

        messages = [
            {k: of(v, _is_of_assistant(message, k)) for k, v in message.items()} for message in values["messages"]
        ]
        return {**{k: of(v, False) for k, v in values.items() if k != "messages"}, "messages": messages}


def _is_of_assistant(message: Mapping[str, Any], key: str) -> bool:
    """Return True for a field with an assistant's own text."""
    return message.get("role") == "assistant" and key in ("content", "reasoning_content")


def _each_changed(pattern: re.Pattern[str], text: str, change: Callable[[str], str]) -> str:
    """Return a text with the second character of each match changed; matches may overlap."""
    pieces, start = [], 0
    found = pattern.search(text)
    while found is not None:
        second = found.start() + 1
        pieces += [text[start:second], change(text[second])]
        start = second + 1
        found = pattern.search(text, second)
    return "".join([*pieces, text[start:]])


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of any of some texts, quick also for thousands of them."""
    return re.compile(_alternatives(sorted(texts), 0) if texts else "(?!)")


def _alternatives(texts: Sequence[str], depth: int) -> str:
    """Return a regex for texts, which are sorted; they are grouped by their first characters."""
    if len(texts) == 1 or depth == MAX_GROUPING:
        return "|".join(re.escape(text) for text in reversed(texts))  # of two that begin alike, the longer first
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:1], []).append(text[1:])
    empty = groups.pop("", None)
    inner = [f"{re.escape(first)}(?:{_alternatives(rest, depth + 1)})" for first, rest in groups.items()]
    return "|".join([*inner, ""] if empty else inner)
