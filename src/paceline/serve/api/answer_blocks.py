"""One answer as blocks of reasoning, text and calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.serve.api.tool_calls.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    ReasoningText,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.request_nouns import Outcome
    from paceline.serve.api.tool_calls.events import AnswerEvent, AnswerReader

BlockKind = Literal["reasoning", "content", "call"]


@dataclass(slots=True, eq=False)
class AnswerBlock:
    """A part of an answer that has one kind."""

    kind: BlockKind
    index: int  # among the answer's blocks
    call_id: str = ""
    name: str = ""  # of the function that a call calls
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text so far; the text of a call is its arguments as JSON."""
        return "".join(self.pieces)


class Change(NamedTuple):
    """Change of a block: it begins, grows by a text, or is complete."""

    what: Literal["open", "more", "close"]
    block: AnswerBlock
    text: str = ""


class AnswerBlocks:
    """Blocks of one answer as it grows."""

    def __init__(self, reader: AnswerReader) -> None:
        self.blocks: list[AnswerBlock] = []
        self.unended: AnswerBlock | None = None  # open when the answer ended: a length limit cuts this one
        self._reader = reader
        self._open: AnswerBlock | None = None

    @property
    def has_calls(self) -> bool:
        """True if the answer calls a tool."""
        return any(block.kind == "call" for block in self.blocks)

    def add(self, outcome: Outcome) -> list[Change]:
        """Take an outcome and return what it changes."""
        return self.push(outcome.text, outcome.token_ids, ends=outcome.finish_reason is not None)

    def push(self, text: str, token_ids: Sequence[int], *, ends: bool) -> list[Change]:
        """Take more of the answer; return what changes. ends: nothing follows."""
        events = self._reader.push(text, token_ids)
        if ends:
            events += self._reader.finish()
        changes: list[Change] = []
        for event in events:
            self._take(event, changes)
        if ends:
            self.unended = self._open
            self._close(changes)
        return changes

    def _take(self, event: AnswerEvent, changes: list[Change]) -> None:
        match event:
            case ReasoningText(text):
                self._more("reasoning", text, changes)
            case ContentText(text):
                self._more("content", text, changes)
            case CallBegin(_, call_id, name):
                self._begin(AnswerBlock("call", len(self.blocks), call_id, name), changes)
            case CallArguments(_, text):
                self._more("call", text, changes)
            case CallEnd():
                self._close(changes)

    def _more(self, kind: BlockKind, text: str, changes: list[Change]) -> None:
        begins = self._open is None or self._open.kind != kind
        if begins and self.blocks:
            text = text.lstrip()  # blocks are told apart, so no empty line stands between them
        if not text:
            return
        if begins:
            self._begin(AnswerBlock(kind, len(self.blocks)), changes)
        assert self._open is not None
        self._open.pieces.append(text)
        changes.append(Change("more", self._open, text))

    def _begin(self, block: AnswerBlock, changes: list[Change]) -> None:
        self._close(changes)
        self._open = block
        self.blocks.append(block)
        changes.append(Change("open", block))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Change("close", self._open))
            self._open = None
