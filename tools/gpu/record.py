"""Results of a phase, on disk as they come."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

_BROKEN = ("CUDA error", "device-side assert")  # after these nothing runs in the process


@dataclass(slots=True)
class Record:
    """Results of one phase and what went wrong in it."""

    phase: str
    path: Path
    limit_s: float
    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # what was tried -> why it failed
    left_out: list[str] = field(default_factory=list)  # parts not run, for lack of time or of a working device
    broken: bool = False
    start_s: float = field(default_factory=perf_counter)

    @property
    def left_s(self) -> float:
        """Seconds until the phase should end."""
        return self.limit_s - (perf_counter() - self.start_s)

    def put(self, *path: object, **values: Any) -> None:
        """Note values under a path of names, and write all to disk."""
        found = self.results
        for name in path:
            found = found.setdefault(str(name), {})
        found.update(values)
        self.write()

    def attempt(self, name: str, run: Callable[..., T], *arguments: Any) -> T | None:
        """Run a part; note an error. None: it failed or was left out."""
        if self.broken or self.left_s <= 0:
            self.left_out.append(name)
            self.write()
            return None
        start = perf_counter()
        try:
            return run(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.errors[name] = f"{text[:600]} | {' < '.join(_places(error))}"
            self.broken = any(mark in text for mark in _BROKEN)
            return None
        finally:
            self.note(f"{name}: {perf_counter() - start:.2f} s")
            self.write()

    def note(self, text: str) -> None:
        """Tell whoever watches."""
        failed = " FAILED" if text.partition(":")[0] in self.errors else ""
        sys.stdout.write(f"  [{self.phase} {perf_counter() - self.start_s:6.1f} s] {text}{failed}\n")
        sys.stdout.flush()

    def write(self) -> None:
        """Write everything; a reader never meets half a file."""
        value = {
            "phase": self.phase,
            "seconds": round(perf_counter() - self.start_s, 2),
            "results": self.results,
            "errors": self.errors,
            "left_out": self.left_out,
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(value, indent=1, default=float), encoding="utf-8")
        os.replace(part, self.path)  # noqa: PTH105 - the one call that replaces at once


def _places(error: BaseException) -> list[str]:
    """Return the last places of an error, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames)]
