"""Messages that a user types: edited lines, a history, silence while an answer comes."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from paceline.serve.terminal.display import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FENCE = '"""'  # alone, or at a line's start: the message goes on to the next one
MAX_HISTORY = 1000
MAX_MESSAGE_CHARS = 1 << 20


def history_file() -> Path:
    """Return where typed lines are kept: `paceline` in the user's folder of program state."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "paceline" / "chat_history"


class LineInput:
    """Messages from a terminal or a stream of lines."""

    def __init__(self, source: TextIO, commands: Sequence[str] = (), keep: bool = True) -> None:
        """Read from `source`. commands: that the tab key completes. keep: a history between sessions."""
        self._source = source
        self._is_terminal = source is sys.stdin and source.isatty()
        self._commands = sorted(commands)
        self._kept = history_file() if self._is_terminal and keep else None
        if self._is_terminal:
            self._prepare()

    def message(self) -> str | None:
        """Return the next message; None at the end of input or after Ctrl-C.

        Ctrl-C in a later line forgets the message: it is empty.
        """
        try:
            line = self._line("> ")
        except KeyboardInterrupt:
            return None
        try:
            return None if line is None else self._whole(line)
        except KeyboardInterrupt:
            say()  # the next prompt stands in a line of its own
            return ""

    def _whole(self, line: str) -> str:
        """Return a message after its first line."""
        if line.lstrip().startswith(FENCE):
            return self._fenced(line.lstrip().removeprefix(FENCE))
        lines = [line]
        while lines[-1].endswith("\\") and sum(map(len, lines)) < MAX_MESSAGE_CHARS:
            more = self._line(". ")
            if more is None:
                break
            lines = [*lines[:-1], lines[-1][:-1], more]
        return "\n".join(lines)

    def close(self) -> None:
        """Write the history."""
        if self._kept is None:
            return
        import readline

        with suppress(OSError):
            self._kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.set_history_length(MAX_HISTORY)
            readline.write_history_file(self._kept)
            self._kept.chmod(0o600)

    def _fenced(self, first: str) -> str:
        lines, size = [first] if first else [], 0
        while (line := self._line(". ")) is not None and size < MAX_MESSAGE_CHARS:
            if line.rstrip().endswith(FENCE):
                last = line.rstrip().removesuffix(FENCE)
                lines += [last] if last else []
                break
            lines.append(line)
            size += len(line)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        try:
            if self._is_terminal:
                return input(prompt)
            line = self._source.readline()
        except EOFError:
            return None
        return line.rstrip("\n") if line else None

    def _prepare(self) -> None:
        import readline

        if self._kept is not None:
            with suppress(OSError):
                readline.read_history_file(self._kept)
        readline.set_completer_delims(" ")
        readline.set_completer(self._completed)
        readline.parse_and_bind("tab: complete")

    def _completed(self, text: str, state: int) -> str | None:
        found = [command for command in self._commands if command.startswith(text)] if text.startswith("/") else []
        return found[state] if state < len(found) else None


@contextmanager
def quiet(source: TextIO) -> Iterator[None]:
    """Show no keys that are typed during the block, and forget them. Ctrl-C still interrupts."""
    if source is not sys.stdin or not source.isatty():
        yield
        return
    import termios

    fd = source.fileno()
    before = termios.tcgetattr(fd)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(fd, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcflush(fd, termios.TCIFLUSH)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
