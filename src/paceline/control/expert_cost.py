"""Price of the experts that a pass touches.

The price of an expert is measured at start. How many experts a pass touches depends on the text, so it is learnt
from real passes: for 1, 2, 4, ... neighbouring tokens, the mean number of experts that these touched. A prompt
tells all these numbers at once, before the first draft is planned.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.cost import TABLE_TOKENS, Curve

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import ExpertCost, PassTable

LEVELS = TABLE_TOKENS.bit_length()  # powers of two up to the largest pass in the table
MIN_RATE = 0.05  # share of an estimate that one pass replaces
MIN_SHARE = 0.1  # least share of a pass's time that one correction leaves
TINY_S = 1e-12  # seconds: least divisor


class ExpertPrices:
    """Corrects the measured times of passes by the experts that real passes touch."""

    def __init__(self, cost: ExpertCost, passes: PassTable) -> None:
        """passes: table whose times are renewed in place."""
        self.read_s = cost.read_s
        self.expected = cost.touched(1 << np.arange(LEVELS))  # experts that 1, 2, 4, ... tokens touch
        self._seen = np.zeros(LEVELS)  # observations of each of these numbers
        self._decoded = np.zeros(LEVELS, bool)  # a pass without prompts was among the observations
        self._passes = passes
        self._tokens = np.arange(len(passes.measured_s))
        self._besides_s = passes.measured_s - self.read_s * self._of(self._tokens)

    def expected_of(self, tokens: int) -> float:
        """Return the distinct experts that a pass of some tokens is expected to touch."""
        return float(self._of(np.array(tokens)))

    def _of(self, tokens: NDArray[int64]) -> NDArray[float64]:
        found: NDArray[float64] = np.interp(np.log2(np.maximum(tokens, 1)), np.arange(LEVELS), self.expected)
        return found

    def surplus_s(self, tokens: int, touched: Sequence[float], drift: float) -> float:
        """Return the seconds that a pass took for touching more experts than expected, or fewer."""
        return self.read_s * (touched[0] - self.expected_of(tokens)) * exp(drift)

    def observe(self, touched: Sequence[float], *, prefills: bool) -> None:
        """Learn from a pass. Prompts teach a number until decoding passes do.

        touched: distinct experts of the pass, then the mean number for 1, 2, 4, ... neighbouring tokens.
        """
        found = np.asarray(touched[1 : LEVELS + 1])
        level = np.arange(LEVELS) < len(found)
        if prefills:
            level &= ~self._decoded
        else:
            self._seen[level & ~self._decoded] = 0.0  # what prompts told is replaced
            self._decoded |= level
        rates = np.maximum(MIN_RATE, 1.0 / (1.0 + self._seen))[level]
        self._seen[level] += 1.0
        self.expected[level] += rates * (found[level[: len(found)]] - self.expected[level])
        self.expected = np.maximum.accumulate(self.expected)  # more tokens touch no fewer
        old_s = self._passes.measured_s
        new_s = np.maximum(self._besides_s + self.read_s * self._of(self._tokens), MIN_SHARE * old_s)
        self._passes.seconds *= new_s / np.maximum(old_s, TINY_S)  # keeps what was learnt of each size
        old_s[:] = new_s


def mean_touched(passes: Iterable[Sequence[float]]) -> Curve:
    """Return the experts that some passes touched, by their tokens: the means of neighbouring tokens."""
    by_level: list[list[float]] = []
    for touched in passes:
        for level, count in enumerate(touched[1:]):
            by_level[level:] = by_level[level:] or [[]]
            by_level[level].append(count)
    return Curve.of([1 << i for i in range(len(by_level))], [float(np.mean(counts)) for counts in by_level])
