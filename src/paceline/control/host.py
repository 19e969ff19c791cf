"""What a step takes beside drafting and the pass: more with more rows, and more with drafts than without.

Drafting is planned, trimmed and learnt from on the host, and that is part of its price: drafts that would just pay
for the pass do not pay for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

ROWS_OF_A_STEP = 10  # a step takes as long as so many rows add, without any: 0.17 ms, and 16 us each (2026-11-22)
RATE = 0.05  # of the way to what a step says
FIRST_RATE = 0.2  # of the first step of a kind; falls as one over the steps, to `RATE`


def rate_after(seen: int) -> float:
    """Return how far to go towards what a step says, after so many of its kind."""
    return max(RATE, 1.0 / (1.0 / FIRST_RATE + seen))


class HostTime:
    """Seconds of the host by rows, of steps without drafts and with some.

    Until seen, those without are as they were measured, and those with some are as those without.
    """

    def __init__(self, seconds: float = 0.0, rows: int = 1) -> None:
        """seconds: of a step with so many rows, as measured."""
        self.of_row: NDArray[float64] = np.full(2, seconds / (ROWS_OF_A_STEP + rows))  # without and with drafts
        self.seen: NDArray[int64] = np.zeros(2, np.int64)

    def __call__(self, rows: int, *, drafts: bool) -> float:
        """Return the seconds of a step."""
        return self.of_row.item(int(drafts)) * (ROWS_OF_A_STEP + rows)

    def fee(self, rows: int) -> float:
        """Return what the first draft of a step costs."""
        return max(self(rows, drafts=True) - self(rows, drafts=False), 0.0)

    def observe(self, rows: int, seconds: float, *, drafts: bool) -> None:
        """Learn from a step; no single one counts for much, as any may be a stall."""
        known = self(rows, drafts=drafts)
        rate = rate_after(self.seen.item(int(drafts)))
        self.seen[int(drafts)] += 1
        self.of_row[int(drafts)] += rate * (min(seconds, 2 * known + 1e-3) - known) / (ROWS_OF_A_STEP + rows)
        if not self.seen[1]:
            self.of_row[1] = self.of_row[0]
