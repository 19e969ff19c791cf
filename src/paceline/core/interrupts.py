"""Ctrl-C between steps, not within one."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def uninterrupted() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the block has ended: half a step would leave an engine in disorder.

    Raises `KeyboardInterrupt` then, or where the block calls what it is given, between two of many steps: to begin
    and end such a block takes 30 us. Other threads are never interrupted; another handler than Python's own stays.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed: list[int] = []

    def look() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield look
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    look()
