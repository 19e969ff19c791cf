"""Tables and bars on a terminal: every text as it is, and plain lines where nothing can be drawn over."""

from __future__ import annotations

import io
import re
import sys

import pytest

from paceline.serve.terminal.banner import LoadingBar
from paceline.serve.terminal.display import progress, table

ADVICE, FOLDER = "pip install 'paceline[cuda]'", "/data/[old]/[/new]/:cat:.gguf"


class Screen(io.StringIO):
    """A terminal; `shown` leaves out what steers it."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


def screen_of(monkeypatch: pytest.MonkeyPatch, term: str = "xterm") -> Screen:
    """A terminal in place of the standard streams."""
    found = Screen()
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", term)
    return found


def test_a_table_shows_brackets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch)
    table("", ["what", "[where]"], [[ADVICE, FOLDER]])
    assert all(text in screen.shown for text in ("[where]", ADVICE, FOLDER))


def test_bars_show_brackets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch)
    with progress(FOLDER) as update:
        update(1, 2)
    with LoadingBar(screen) as bar:
        bar(ADVICE, 1, 2)
    assert all(text in screen.shown for text in (ADVICE, FOLDER))


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch, "dumb")
    with progress("pulling") as update:
        update(1, 2)
    with LoadingBar(screen) as bar:
        bar("loading", 1, 2)
    assert screen.getvalue() == "pulling: 50 %\nloading ...\n"
