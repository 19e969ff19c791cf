"""What processes of ours owe each other: a child ends with its parent, and is started again ever more slowly."""

from __future__ import annotations

import os
import sys
import threading

FIRST_WAIT_S = 0.25  # before the first restart; doubled while the process keeps ending
MAX_WAIT_S = 30.0
MOST_DOUBLINGS = 16  # by then the wait is the longest; 2 to the power of some thousand deaths is no float
STEADY_S = 60.0  # a process that lived so long died of something new


class BackOff:
    """How long to wait before a process that ended is started again."""

    def __init__(self) -> None:
        self._deaths = 0  # in a row

    def wait_s(self, lived_s: float) -> float:
        """Return the seconds to wait after a process that lived so many."""
        self._deaths = 0 if lived_s > STEADY_S else self._deaths + 1
        doublings = min(max(self._deaths - 1, 0), MOST_DOUBLINGS)
        return float(min(FIRST_WAIT_S * 2**doublings, MAX_WAIT_S))


def end_with_parent() -> None:
    """Leave at once when stdin ends: the parent held it open, is gone, and nobody reads what we write."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
