"""Which drafters are left in peace: who fails several times in a row is asked again later, and ever more rarely.

What fails brings nothing to learn from, so without this a controller would go on planning with what it believed
before, and never turn to a drafter that works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FAILURES = 4  # in a row, after which a drafter has peace ...
LEAST_PEACE, MOST_PEACE = 16, 256  # ... for so many plans, twice as many each time
NOBODY: frozenset[int] = frozenset()


class FailureBackoff:
    """Failures of each drafter since it last did what it was asked to."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._until: dict[str, int] = {}  # plan from which it is asked again
        self._plans = 0

    def note(self, name: str, *, failed: bool) -> None:
        """A drafter was asked to draft."""
        if not failed:
            self._failures.pop(name, None)
            return
        self._failures[name] = count = self._failures.get(name, 0) + 1
        if count >= FAILURES:
            self._until[name] = self._plans + min(LEAST_PEACE << min(count - FAILURES, 8), MOST_PEACE)

    def out(self, index: Mapping[str, int]) -> frozenset[int]:
        """Begin a plan; return the drafters, by their index, that are not to be asked for it."""
        self._plans += 1
        if not self._until:
            return NOBODY
        self._until = {name: plan for name, plan in self._until.items() if plan > self._plans}
        return frozenset(index[name] for name in self._until)
