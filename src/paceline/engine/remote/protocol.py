"""Messages between the engine and a drafter's process, and their channel: one question, one answer.

A message lies in memory that both processes see, and a byte on a socket says that it is there. Each end writes
into its own half, and only after it has read the other's last message. The memory has no name, so nothing of it is
left behind however the processes end.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from mmap import mmap
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from paceline.core.nouns import Stop
from paceline.core.system import anonymous_memory
from paceline.draft.drafter import MAX_K, Needs
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.wire import Failed, Message, Submit, TokenId

if TYPE_CHECKING:
    from paceline.engine.request_table import Limits

_MAX_PARAMS_BYTES = 1 << 16  # most bytes of one request's parameters: enough for a thousand biases
_SPARE_BYTES = 1 << 20  # room for everything but tokens, pages and parameters
_MAX_INT_BYTES = 5  # most bytes of one integer in msgpack
_WAKE = b"\1"
_HEAD_BYTES = 8  # bytes before a message: its length, little endian

Number = Annotated[int, Meta(ge=0)]


class DraftPart(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A part of a message."""


class NewRow(DraftPart, frozen=True):
    """A request in a row that the drafter does not know yet."""

    row: Number
    request: Submit
    written: tuple[TokenId, ...]  # tokens of the answer so far
    valid_lens: tuple[Number, ...]  # leading tokens that each of the drafter's stores holds


class RowUpdate(DraftPart, frozen=True):
    """Changes of a row since the drafter last heard of it."""

    row: Number
    token_ids: tuple[TokenId, ...]  # tokens gained
    num_kept_pages: Number = 0  # first known pages, which stay ...
    pages: tuple[Number, ...] = ()  # ... followed by these


# To the drafter --------------------------------------------------------------------------------------


class BeginDrafter(Message, frozen=True):
    """The first message: the drafter to load."""

    config: EngineConfig
    index: Number  # index of the drafter among the config's
    num_pages: Number  # pages of the engine's pool


class Propose(Message, frozen=True):
    """Draft up to `ks[i]` tokens for the i-th row, or to where `stops[i]` ends it."""

    ended: tuple[Number, ...]  # rows given up, released before new rows take their places
    new: tuple[NewRow, ...]
    rows: tuple[RowUpdate, ...]
    ks: tuple[Annotated[int, Meta(ge=1, le=MAX_K)], ...]
    stops: tuple[Stop | None, ...]


class Commit(Message, frozen=True):
    """The steps of these rows are over."""

    rows: tuple[RowUpdate, ...]
    chosen: tuple[tuple[int, ...], ...]  # [num_rows][1 + drafts] the target's tokens at each scored position


class Forget(Message, frozen=True):
    """Drop what was learnt across requests."""


# To the engine ---------------------------------------------------------------------------------------


class Up(Message, frozen=True):
    """The drafter is loaded."""

    needs: Needs
    report: dict[str, str | int | float]


class RemoteRowDraft(DraftPart, frozen=True):
    """A draft of one row. The engine checks it as it checks any drafter's."""

    token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_K)]
    confidence: Annotated[tuple[float, ...], Meta(max_length=MAX_K)] | None


class DraftReply(Message, frozen=True):
    """Drafts, row by row."""

    rows: tuple[RemoteRowDraft, ...]


class ValidLens(Message, frozen=True):
    """Leading tokens of each row that each of the drafter's stores holds."""

    rows: tuple[tuple[Number, ...], ...]


class Done(Message, frozen=True):
    """An answer without content."""


ToDrafter = BeginDrafter | Propose | Commit | Forget
ToEngine = Up | DraftReply | ValidLens | Done | Failed

decode_to_drafter = msgspec.msgpack.Decoder(ToDrafter).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode


def max_message_bytes(limits: Limits) -> int:
    """Return the largest message's size in bytes: all rows new at once, of full length."""
    tokens = limits.max_len * (_MAX_INT_BYTES + 1)  # one byte more per token, for page numbers
    return _SPARE_BYTES + limits.num_rows * (_MAX_PARAMS_BYTES + tokens)


# The channel -----------------------------------------------------------------------------------------


class ChannelClosed(Exception):  # noqa: N818 (a state, no error of the user's)
    """The other end is gone, or has sent what it never sends."""


class Channel:
    """One end of a channel."""

    def __init__(self, line: socket.socket, memory_fd: int, *, first: bool) -> None:
        """first: this end writes into the first half of the memory."""
        self._line = line
        self._memory = mmap(memory_fd, 0)
        self._max_bytes = len(self._memory) // 2 - _HEAD_BYTES  # bytes of the longest message
        halves = (0, len(self._memory) // 2)
        self._out, self._in = halves if first else halves[::-1]

    def send(self, message: bytes) -> None:
        """Send a message. Raises `ValueError` if it is too long, `ChannelClosed`."""
        if len(message) > self._max_bytes:
            raise ValueError(f"a message of {len(message)} bytes is more than the {self._max_bytes} that fit")
        start = self._out + _HEAD_BYTES
        self._memory[self._out : start] = len(message).to_bytes(_HEAD_BYTES, "little")
        self._memory[start : start + len(message)] = message
        try:
            self._line.sendall(_WAKE)
        except OSError as error:
            raise ChannelClosed("it has ended") from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next message. Raises `TimeoutError`, `ChannelClosed`."""
        self._line.settimeout(timeout_s)
        try:
            woken = self._line.recv(len(_WAKE))
        except ConnectionError as error:
            raise ChannelClosed("it has ended") from error
        if not woken:
            raise ChannelClosed("it has ended")
        start = self._in + _HEAD_BYTES
        length = int.from_bytes(self._memory[self._in : start], "little")
        if length > self._max_bytes:
            raise ChannelClosed(f"it says that its message has {length} bytes, of at most {self._max_bytes}")
        return self._memory[start : start + length]

    def close(self) -> None:
        """Close this end."""
        self._line.close()
        self._memory.close()


def open_channel(max_bytes: int) -> tuple[Channel, socket.socket, int]:
    """Return one end of a channel, then socket and memory descriptor for the other end.

    max_bytes: the longest message. Messages take memory only as they fill it.
    """
    with ExitStack() as undo:  # closes what was opened if descriptors run out on the way
        memory_fd = anonymous_memory(2 * (max_bytes + _HEAD_BYTES))
        undo.callback(os.close, memory_fd)
        ours, theirs = map(undo.enter_context, socket.socketpair())
        channel = Channel(ours, memory_fd, first=True)
        undo.pop_all()
    return channel, theirs, memory_fd
