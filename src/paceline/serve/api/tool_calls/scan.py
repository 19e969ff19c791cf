"""Scanners of text in pieces: ends of JSON, markers, special tokens put back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from paceline.serve.conversation import MAX_FUNCTION_CHARS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.model.tokenizer import Tokenizer

_SCALAR_ENDS = frozenset(",]} \t\n\r;")


class JsonEnd:
    """Finder of the end of one JSON value, fed in pieces and not checked."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._kind = ""  # first character of the value
        self.done = False

    def feed(self, text: str) -> int:
        """Return how many characters of `text` belong to the value."""
        for at, char in enumerate(text):
            if not self._kind:
                if char.isspace():
                    continue
                self._kind = char if char in '{["' else "scalar"
            if self._kind == "scalar":
                if char in _SCALAR_ENDS:
                    self.done = True
                    return at
            elif self._take(char):
                self.done = True
                return at + 1
        return len(text)

    def _take(self, char: str) -> bool:
        """Take a character of a value; return True if it is the last."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return self._depth == 0
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


def split_at(text: str, markers: Iterable[str]) -> tuple[str, str, str]:
    """Return (text before the first marker, the marker, text after it).

    Without a marker the last part is the end of the text that a marker may begin with.
    """
    found = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    if found:
        at, _, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    held = held_length(text, markers)
    return text[: len(text) - held], "", text[len(text) - held :]


def held_length(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest end of `text` that a marker begins with."""
    held = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), held, -1):
            if text.endswith(marker[:length]):
                held = length
                break
    return held


_SPACE = r"[ \t\r\n]*"
NAME_REGEX = rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"'  # of an object's beginning, up to its name
# What may stand before an object: a fence, a bracket, and a second brace, which some templates show.
_FENCE = rf"(?:`{{3}}[a-z]{{0,8}}{_SPACE})?(?:\[{_SPACE})?(?:\{{(?=\{{))?"
_OPEN_FENCE = rf"(?:`{{1,3}}(?:(?<=```)[a-z]{{0,8}}{_SPACE})?)?(?:\[{_SPACE})?(?:\{{(?=\{{))?"  # not complete


def head_regex(names: Iterable[str], key: str) -> str:
    """Return the regex of a call's head: an object with one of some names."""
    named = "|".join(re.escape(name) for name in names)
    return rf'{NAME_REGEX}(?:{named})"{_SPACE},{_SPACE}"{key}"{_SPACE}:'


class BareSplit(NamedTuple):
    """Text before a call, and the place of the call's object."""

    before: str
    at: int
    found: bool


class BareHead:
    """Finder of calls that are objects without markers, in text that grows."""

    def __init__(self, names: Sequence[str], key: str) -> None:
        """key: of the arguments."""
        self._head = re.compile(rf"{_FENCE}({head_regex(names, key)})")
        name = rf"[\w.-]{{0,{MAX_FUNCTION_CHARS}}}"
        steps = [_SPACE, *'"name"', _SPACE, ":", _SPACE, '"', name, '"', _SPACE, ",", _SPACE]
        partial = ""
        for step in reversed([*steps, *f'"{key}"', _SPACE]):
            partial = f"(?:{step}{partial})?"
        self._partial = re.compile(rf"{_OPEN_FENCE}(?:\{{{partial})?\Z")

    def split(self, text: str) -> BareSplit:
        """Return where a call begins, or might begin with the end of a text."""
        head = self._head.search(text)
        if head is not None:
            return BareSplit(text[: head.start()], head.start(1), True)
        at = next((m.start() for m in self._partial.finditer(text)), len(text))
        return BareSplit(text[:at], at, False)


class MarkerText:
    """Text of an answer with the special tokens that mark its parts."""

    def __init__(self, tokenizer: Tokenizer, markers: Mapping[int, str], within: bool) -> None:
        """markers: token id -> text of special tokens to put back. within: see `Request`."""
        self._detokenizer = tokenizer.detokenizer(within=within)
        self._markers = markers
        self._pending: list[int] = []  # ids that were not turned into text, as no marker came behind them
        self._num_read = 0  # characters before the last marker
        self._num_emitted = 0
        self._places: list[tuple[int, str]] = []  # (characters before it, marker) of markers not emitted

    def push(self, text: str, token_ids: Sequence[int]) -> str:
        """Return an outcome's text with the markers among its tokens."""
        if not self._markers.keys().isdisjoint(token_ids):
            self._find(token_ids)
        else:
            self._pending.extend(token_ids)
        if not self._places:
            self._num_emitted += len(text)
            return text
        return self._merged(text)

    def _find(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            marker = self._markers.get(token_id)
            if marker is None:
                self._pending.append(token_id)
                continue
            self._num_read += len(self._detokenizer.push(self._pending))
            self._pending.clear()
            self._places.append((self._num_read, marker))

    def _merged(self, text: str) -> str:
        pieces, start = [], 0
        while self._places and self._places[0][0] <= self._num_emitted + len(text):
            place, marker = self._places.pop(0)
            end = place - self._num_emitted
            pieces += [text[start:end], marker]
            start = end
        self._num_emitted += len(text)
        return "".join([*pieces, text[start:]])
