"""Backoff of drafters that fail again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_FAILURES = 4  # in a row, then plans leave the drafter out for a while
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # plans; doubled with each further failure


class FailureBackoff:
    """Backoff that leaves a drafter out of plans after repeated failures, longer each time.

    The controller learns nothing from a failure, so without this it would go on planning with the failing drafter.
    """

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}  # of each drafter, since it last drafted
        self.until: dict[str, int] = {}  # number of the plan from which a drafter is asked again
        self._num_plans = 0

    def note(self, name: str, *, failed: bool) -> None:
        """Note that a drafter was asked to draft, and whether it failed."""
        if not failed:
            self.failures.pop(name, None)
            return
        count = self.failures.get(name, 0) + 1
        self.failures[name] = count
        if count >= MAX_FAILURES:
            self.until[name] = self._num_plans + min(FIRST_PAUSE << min(count - MAX_FAILURES, 8), LONGEST_PAUSE)

    def unavailable(self, index: Mapping[str, int]) -> frozenset[int]:
        """Begin a plan; return indices of drafters to leave out. index: name -> index."""
        self._num_plans += 1
        self.until = {name: plan for name, plan in self.until.items() if plan > self._num_plans}
        return frozenset(index[name] for name in self.until)
