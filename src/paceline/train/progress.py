"""Progress on stderr: a bar on a terminal, elsewhere a line every 30 seconds."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Update = Callable[[int, int, str], None]  # (done, total, a note)

LINE_EVERY_S = 30.0


@contextmanager
def progress(what: str) -> Iterator[Update]:
    """Show the progress of a task; yields the function that updates it."""
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None, note="")
        yield lambda done, total, note: bar.update(task, completed=done, total=total, note=note)


def _lines(what: str) -> Update:
    last_line_s = -LINE_EVERY_S

    def update(done: int, total: int, note: str) -> None:
        nonlocal last_line_s
        if done >= total or time.monotonic() - last_line_s >= LINE_EVERY_S:
            last_line_s = time.monotonic()
            sys.stderr.write(f"{what}: {done} of {total} {note}\n")
            sys.stderr.flush()

    return update
