"""Which drafters may still pay here: one whose probes say that it cannot, time and again, is given up.

Probes are rare, so what is known of a drafter that is never chosen is their plain record: how many drafts were
tested at each depth, and kept. The best that this admits is two deviations above its mean (Agresti and Coull).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.control.policy import NONE

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Outcomes

LOOKS = 256  # one after another, at which it could not have paid
REQUESTS = 32  # that came meanwhile
TRIES = 64  # of its drafts that were tested
DEVIATIONS = 2.0


class Hopes:
    """What speaks against each drafter since it last seemed to pay."""

    def __init__(self, num_drafters: int, max_k: int) -> None:
        self.gone: frozenset[int] = frozenset()  # given up
        self._looks: NDArray[int64] = np.zeros(num_drafters, np.int64)
        self._requests: NDArray[int64] = np.zeros(num_drafters, np.int64)
        self._tested, self._kept = np.zeros((2, num_drafters, max_k))  # [num_drafters, max_k] each
        self._doubted: set[int] = set()  # those that anything has been noted of since they last seemed to pay

    def admit(self) -> None:
        """A request begins."""
        self._requests += 1
        self._doubted.update(range(len(self._looks)))

    def learn(self, outcomes: Outcomes, probed: int) -> None:
        """Take in a step. A drafter that drafted for other rows than the one that was probed seemed to pay."""
        drafters = outcomes.drafters.tolist()
        if probed == NONE and self._doubted.isdisjoint(drafters):
            return
        rows = outcomes.rows.tolist()
        seemed = {d for row, d in zip(rows, drafters, strict=True) if d >= 0 and row != probed}
        for drafter in seemed & self._doubted:
            self._looks[drafter] = self._requests[drafter] = 0
            self._tested[drafter] = self._kept[drafter] = 0.0
        self._doubted -= seemed
        index = rows.index(probed) if probed in rows else NONE
        if index != NONE and drafters[index] != NONE and drafters[index] not in seemed:
            kept, verified = int(outcomes.num_accepted[index]), int(outcomes.num_verified[index])
            self._doubted.add(drafters[index])
            self._tested[drafters[index], : min(kept + 1, verified)] += 1.0
            self._kept[drafters[index], :kept] += 1.0

    def best_case(self, drafter: int) -> NDArray[float64]:
        """Return the highest chances to be alive at each depth that its record admits. [max_k]"""
        tested = self._tested[drafter] + DEVIATIONS**2
        mean = (self._kept[drafter] + DEVIATIONS**2 / 2) / tested
        highest = np.minimum(mean + DEVIATIONS * np.sqrt(mean * (1 - mean) / tested), 1.0)
        alive: NDArray[float64] = np.multiply.accumulate(highest)
        return alive

    def look(self, drafter: int, could_pay: bool, times: int = 1) -> bool:
        """Note whether a drafter could have paid at its best. Returns whether more must be known of it.

        times: looks that this one stands for, as choices that hold keep others from being made.
        """
        self._looks[drafter] = 0 if could_pay else self._looks[drafter] + times
        self._doubted.add(drafter)
        return could_pay or bool(self._tested[drafter, 0] < TRIES)

    def give_up(self) -> tuple[int, ...]:
        """Return the drafters that are hopeless from now on."""
        enough = (self._looks >= LOOKS) & (self._requests >= REQUESTS) & (self._tested[:, 0] >= TRIES)
        hopeless = sorted(set(enough.nonzero()[0].tolist()) - self.gone)
        self.gone = self.gone.union(hopeless)
        return tuple(hopeless)
