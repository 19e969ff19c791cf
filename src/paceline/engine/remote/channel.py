"""A line between two processes: a message lies in memory that both see, and a byte on a socket says that it does.

Each end writes into a half of its own, and only after it has read the other's last message: questions and answers
take turns. The memory has no name, so nothing of it is left behind however the two end.
"""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import ExitStack
from mmap import mmap

_WAKE = b"\1"
_HEAD_BYTES = 8  # the length of a message, before it


class LineDead(Exception):  # noqa: N818 (it is a state)
    """The other end is gone, or says what cannot be true."""


class Channel:
    """One end of a line."""

    def __init__(self, line: socket.socket, memory_fd: int, *, first: bool) -> None:
        """first: whether this end writes into the first half."""
        self._line = line
        self._memory = mmap(memory_fd, 0)
        self._most = len(self._memory) // 2 - _HEAD_BYTES  # bytes of a message
        halves = (0, len(self._memory) // 2)
        self._out, self._in = halves if first else halves[::-1]

    def send(self, message: bytes) -> None:
        """Send a message. Raises `ValueError` if it is too long, `LineDead`."""
        if len(message) > self._most:
            raise ValueError(f"a message of {len(message)} bytes is more than the {self._most} that fit")
        start = self._out + _HEAD_BYTES
        self._memory[self._out : start] = len(message).to_bytes(_HEAD_BYTES, "little")
        self._memory[start : start + len(message)] = message
        try:
            self._line.sendall(_WAKE)
        except OSError as error:
            raise LineDead("it has ended") from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next message. Raises `TimeoutError`, `LineDead`."""
        self._line.settimeout(timeout_s)
        try:
            woken = self._line.recv(len(_WAKE))
        except ConnectionError as error:
            raise LineDead("it has ended") from error
        if not woken:
            raise LineDead("it has ended")
        start = self._in + _HEAD_BYTES
        length = int.from_bytes(self._memory[self._in : start], "little")
        if length > self._most:
            raise LineDead(f"it says that its message has {length} bytes, of at most {self._most}")
        return self._memory[start : start + length]

    def close(self) -> None:
        """Close this end."""
        self._line.close()
        self._memory.close()


def open_line(most_bytes: int) -> tuple[Channel, socket.socket, int]:
    """Return one end of a line for messages of so many bytes, and the socket and the memory that the other needs.

    Memory is only taken as messages fill it.
    """
    with ExitStack() as undo:  # descriptors may run out on the way
        memory_fd = _memory(2 * (most_bytes + _HEAD_BYTES))
        undo.callback(os.close, memory_fd)
        ours, theirs = map(undo.enter_context, socket.socketpair())
        channel = Channel(ours, memory_fd, first=True)
        undo.pop_all()
    return channel, theirs, memory_fd


def _memory(num_bytes: int) -> int:
    """Return a descriptor of memory without a name, zeros."""
    if hasattr(os, "memfd_create"):
        found = os.memfd_create("paceline")
    else:
        with tempfile.TemporaryFile() as file:
            found = os.dup(file.fileno())
    os.ftruncate(found, num_bytes)
    return found
