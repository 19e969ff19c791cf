"""Output of commands: progress bars and tables on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Update = Callable[[int, int], None]  # (done, total)

_TENTHS = 10


def say(text: str = "") -> None:
    """Write a line to stdout."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def is_screen(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can draw over what it shows."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(what: str, unit: str = "", *, quiet: bool = False) -> Iterator[Update]:
    """Show progress on stderr: a terminal bar, or a line per tenth.

    unit: "B": bytes. quiet: a bar only.
    """
    if not is_screen(sys.stderr):
        yield (lambda *_: None) if quiet else _Lines(what)
        return
    from rich import progress as rich
    from rich.console import Console

    count = rich.DownloadColumn() if unit == "B" else rich.MofNCompleteColumn()
    name = rich.TextColumn("{task.description}", markup=False)
    columns = (name, rich.BarColumn(), count, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


class _Lines:
    """Progress as plain lines, one for each tenth."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown_tenths = -1

    def __call__(self, done: int, total: int) -> None:
        tenths = _TENTHS * done // total if total else 0
        if tenths > self._shown_tenths:
            self._shown_tenths = tenths
            sys.stderr.write(f"{self._what}: {100 * tenths // _TENTHS} %\n")
            sys.stderr.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> None:
    """Print a table, ruled on a terminal, plain elsewhere. num_left: first columns aligned left."""
    if not sys.stdout.isatty():
        say(plain_table(title, columns, rows, num_left))
        return
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*columns, title=title or None)
    for column in drawn.columns[num_left:]:
        column.justify = "right"
    for row in rows:
        drawn.add_row(*row)
    Console(markup=False, emoji=False).print(drawn)  # cells are text: paths and names may hold [brackets]


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Return a table as lines of text."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    texts = ["  ".join(_aligned(line, widths, num_left)).rstrip() for line in lines]
    return "\n".join([*([title] if title else []), *texts, ""])


def _aligned(line: Sequence[str], widths: Sequence[int], num_left: int) -> Iterator[str]:
    for index, (cell, width) in enumerate(zip(line, widths, strict=True)):
        yield cell.rjust(width) if index >= num_left else cell.ljust(width)
