"""The last seconds of a server: rates, and how long clients waited."""

from __future__ import annotations

import time
from collections import deque
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.engine.stats import Stats
    from paceline.serve.worker.messages import Snapshot

RATE_S = 3.0  # window of tokens per second
SHARE_S = 30.0  # window of acceptance and tokens per pass, which vary more
APART_S = 0.125  # shortest time between two kept snapshots, the newest aside
MOST_TIMES = 512  # times of answers that are kept for percentiles
PLAIN = "none"  # name of passes without a drafter
TARGET = "target"  # source of the tokens that the target chose itself


class Recent:
    """Snapshots of the last seconds, and times of the last answers."""

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, Snapshot]] = deque()
        self._ttft_s: deque[float] = deque(maxlen=MOST_TIMES)
        self._tpot_s: deque[float] = deque(maxlen=MOST_TIMES)
        self.engines: Callable[[], Iterable[Recent]] = lambda: (self,)  # replaced where this is a sum of several

    # What comes in -------------------------------------------------------------------------------

    def take(self, snapshot: Snapshot) -> None:
        """Add the engine's newest snapshot. A restarted engine counts from 0 again."""
        if self._snapshots and snapshot.stats.steps < self._snapshots[-1][1].stats.steps:
            self._snapshots.clear()
        now_s = time.monotonic()
        if len(self._snapshots) > 1 and now_s - self._snapshots[-2][0] < APART_S:
            self._snapshots.pop()  # short answers end with one each; they must not push out what the windows need
        self._snapshots.append((now_s, snapshot))
        while len(self._snapshots) > 1 and self._snapshots[1][0] < now_s - SHARE_S:
            self._snapshots.popleft()

    def first_token(self, wait_s: float) -> None:
        """Add the time from a request's arrival to its first token."""
        self._ttft_s.append(wait_s)

    def later_tokens(self, mean_s: float) -> None:
        """Add an answer's mean time per token after the first."""
        self._tpot_s.append(mean_s)

    # What is told --------------------------------------------------------------------------------

    @property
    def newest(self) -> Snapshot | None:
        """Newest snapshot; None before the engine is ready."""
        return self._snapshots[-1][1] if self._snapshots else None

    def since(self, begin_s: float) -> Stats | None:
        """Return what was counted since a moment of `time.monotonic()`; None without a snapshot."""
        newest = self.newest
        if newest is None:
            return None
        before = [snapshot for at_s, snapshot in self._snapshots if at_s <= begin_s]
        return newest.stats.since(before[-1].stats if before else self._snapshots[0][1].stats)

    def speed(self, begin_s: float) -> tuple[float, float | None]:
        """Return tokens per second of steps, and an estimate of the same without drafts.

        begin_s: as for `since`. Engines step side by side, so their speeds add up.
        """
        counted = [stats for engine in self.engines() if (stats := engine.since(begin_s)) is not None]
        tokens_per_s = sum(stats.output_tokens / stats.step_s for stats in counted if stats.step_s)
        whole = self.since(begin_s)
        speedup = None if whole is None else whole.predictions.speedup
        return round(tokens_per_s, 3), round(tokens_per_s / speedup, 3) if speedup else None

    def figures(self) -> dict[str, Any]:
        """Return rates of the last seconds, and counts since the engine started."""
        now_s = time.monotonic()
        newest, share = self.newest, self.since(now_s - SHARE_S)
        if newest is None or share is None:
            return {}
        stats, gauges = newest.stats, newest.gauges
        tokens_per_s, plain_tokens_per_s = self.speed(now_s - RATE_S)
        return {
            "tokens_per_s": tokens_per_s,
            "plain_tokens_per_s": plain_tokens_per_s,
            "tokens_per_pass": per_pass(share),
            "acceptance_by_position": acceptance_by_position(share),
            "k_by_drafter": k_by_drafter(stats),
            "tokens_by_source": tokens_by_source(stats),
            "rows_running": gauges.num_running,
            "rows_waiting": gauges.num_waiting,
            "pages_used": gauges.num_held_pages,
            "pages_total": gauges.num_pages,
            "ttft_ms": _percentiles(self._ttft_s),
            "tpot_ms": _percentiles(self._tpot_s),
        }


def per_pass(stats: Stats) -> float | None:
    """Return tokens per decode pass of a row."""
    return round(stats.decoded_tokens / stats.decode_passes, 4) if stats.decode_passes else None


def acceptance_by_position(stats: Stats) -> list[float]:
    """Return the share of the verified drafts that were kept, by position, of all drafters."""
    counts = stats.drafters.values()
    verified, accepted = _sums(c.verified_at for c in counts), _sums(c.accepted_at for c in counts)
    return [round(a / v, 4) if v else 0.0 for a, v in zip_longest(accepted, verified, fillvalue=0)]


def k_by_drafter(stats: Stats) -> dict[str, list[int]]:
    """Return the number of passes that verified 0, 1, 2, ... drafts, by drafter."""
    found = {name: [0, *_exactly(counts.verified_at)] for name, counts in stats.drafters.items()}
    drafted = sum(sum(passes) for passes in found.values())
    return found | {PLAIN: [max(stats.decode_passes - drafted, 0)]}


def tokens_by_source(stats: Stats) -> dict[str, int]:
    """Return the number of tokens written, by drafter and by the target itself."""
    found = {name: counts.accepted for name, counts in stats.drafters.items()}
    return found | {TARGET: max(stats.output_tokens - sum(found.values()), 0)}


def _exactly(at_least: Sequence[int]) -> list[int]:
    """Return how many passes had exactly 1, 2, ... drafts."""
    return [count - after for count, after in zip(at_least, [*at_least[1:], 0], strict=True)]


def _sums(lists: Iterable[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the 95th percentile, in milliseconds."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        name: round(1e3 * ordered[round(share * last)], 3) if ordered else None
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }
