"""Hedging: the requests that a second replica should write, too."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.serve.fleet.journal import AnswerLeg, OngoingAnswer

BUDGET = 0.02  # share of all requests that may be hedged
MOST_LEFT = 20.0  # hedges saved in calm times at most: a bad hour must not spend a month's savings
MIN_SAMPLES = 20  # of lateness, before anything is hedged
MOST_SAMPLES = 512
QUANTILE = 0.95
LEAST_WAIT_S = 0.05  # waits shorter than this are never late


class Hedging:
    """Lateness of first tokens, against predictions, and the budget."""

    def __init__(self, budget: float) -> None:
        """budget: share of requests that may be hedged."""
        self._budget = budget
        self._late: deque[float] = deque(maxlen=MOST_SAMPLES)  # waited / predicted
        self._factor: float | None = None  # quantile of these ratios; None: to be computed
        self.left = 0.0  # hedges that may begin

    def came(self, count: int) -> None:
        """Note requests that begin: each brings its share of a hedge."""
        self.left = min(self.left + self._budget * count, MOST_LEFT)

    def first_token(self, predicted_s: float, waited_s: float) -> None:
        """Note when a first token came."""
        self._late.append(waited_s / max(predicted_s, 1e-6))
        self._factor = None

    def late(self, answers: Iterable[OngoingAnswer]) -> Iterator[tuple[OngoingAnswer, AnswerLeg]]:
        """Yield the answers that should be hedged now, and their only legs."""
        now_s = time.monotonic()
        for answer in tuple(answers) if self._budget else ():
            if len(answer.legs) != 1 or answer.told or answer.aborted or not answer.request.keeps_text:
                continue
            if not (leg := answer.legs[0]).spoke and self.due(leg.wait_s, now_s - leg.began_s):
                yield answer, leg

    def due(self, predicted_s: float, waited_s: float) -> bool:
        """True if a request that waits so long should be hedged, and may be."""
        if waited_s < LEAST_WAIT_S or self.left < 1 or len(self._late) < MIN_SAMPLES:
            return False
        if self._factor is None:
            self._factor = sorted(self._late)[int(QUANTILE * (len(self._late) - 1))]
        return waited_s > self._factor * predicted_s
