"""Overlap of one group's drafting with the other's pass: does it pay?

All rows together take V + t: V is the pass with the host's time around it, t is drafting. Two groups take
max(V1, t2) + max(V2, t1) if drafters have a device of their own; on the target's device all four add up. V1 + V2
is V + A: the fixed cost A of a pass is paid twice. So overlap pays if drafting takes longer than A; with equal
halves and t <= V, exactly if t > A. It does not pay for cheap drafters, however good they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.policy import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.control.controller import ClosedLoop
    from paceline.control.protocols import StepCost

    Part = tuple[NDArray[int64], NDArray[int64], NDArray[int64]]  # lengths, drafts and drafters of some rows

BEGIN_MARGIN = 0.03  # share by which overlap must promise to win before it begins
ASK_EVERY = 8  # steps between two comparisons
MIN_RATE = 0.02  # least share of the means that one step of their kind replaces
MAX_STALL = 4.0  # one step counts as at most so many mean steps
FADE = 1 / 256  # share of what is known of overlap that is lost with each comparison while it is off


@dataclass(frozen=True, slots=True)
class PartCost:
    """Seconds of some rows."""

    verify_s: float  # V
    draft_s: float  # t


@dataclass(frozen=True, slots=True)
class OverlapCost:
    """Seconds of a round of all rows, together and in two groups."""

    whole: PartCost
    first: PartCost
    second: PartCost
    apart: bool  # drafters have a device of their own

    @property
    def serial_s(self) -> float:
        """Seconds of a round of all rows together."""
        return self.whole.verify_s + self.whole.draft_s

    @property
    def overlapped_s(self) -> float:
        """Seconds of a round of each group, one beside the other."""
        a, b = self.first, self.second
        if self.apart:
            return max(a.verify_s, b.draft_s) + max(b.verify_s, a.draft_s)
        return (a.verify_s + b.draft_s) + (b.verify_s + a.draft_s)

    @property
    def gain(self) -> float:
        """Rounds per second with overlap, relative to all rows together."""
        return self.serial_s / self.overlapped_s if self.overlapped_s else 1.0

    @property
    def fixed_s(self) -> float:
        """A: fixed cost of a pass, which overlap pays twice."""
        return self.first.verify_s + self.second.verify_s - self.whole.verify_s

    def explain(self) -> str:
        """Return the inequality with its numbers."""
        join, sign = "max" if self.apart else "sum", "<" if self.gain > 1 else ">="
        a, b, better = self.first, self.second, "overlap" if self.gain > 1 else "all rows together"
        pairs = ("V1", a.verify_s, "t2", b.draft_s), ("V2", b.verify_s, "t1", a.draft_s)
        taken = " + ".join(f"{join}({v} {_ms(v_s)}, {t} {_ms(t_s)})" for v, v_s, t, t_s in pairs)
        together = f"V {_ms(self.whole.verify_s)} + t {_ms(self.whole.draft_s)} ms"
        return (
            f"{taken} = {_ms(self.overlapped_s)} {sign} {_ms(self.serial_s)} = {together}; "
            f"A is {_ms(self.fixed_s)} ms: {better} would be faster"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def overlap_cost(cost: StepCost, parts: Sequence[Part], *, apart: bool) -> OverlapCost:
    """Price two groups of rows, and both together, without prefill."""
    lengths, ks, drafters = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    first, second = (_part_cost(cost, part) for part in parts)
    return OverlapCost(_part_cost(cost, (lengths, ks, drafters)), first, second, apart)


def _part_cost(cost: StepCost, part: Part) -> PartCost:
    lengths, ks, drafters = part
    keys = int(lengths.sum())
    draft_s = cost.drafting_s(ks, drafters)
    return PartCost(cost.price(Work(len(lengths), 0, keys, keys), lengths, ks, drafters) - draft_s, draft_s)


def planned_overlap(loop: ClosedLoop, *, apart: bool, overlapped: bool) -> OverlapCost | None:
    """Price the last plan of a loop in two groups.

    Groups that are not there yet are every other row. None if the loop knows no prices, or if there are not two
    rows.
    """
    loops = (loop, loop.second_group) if overlapped else (loop,)
    parts = [part for part in map(_planned, loops) if part is not None]
    if not overlapped:
        parts = [(lengths[i::2], ks[i::2], drafters[i::2]) for lengths, ks, drafters in parts for i in (0, 1)]
    if loop.cost is None or len(parts) != 2 or not all(len(lengths) for lengths, _, _ in parts):
        return None
    return overlap_cost(loop.cost, parts, apart=apart)


def _planned(loop: ClosedLoop) -> Part | None:
    if loop.view is None or loop.decision is None:
        return None
    return loop.view.lengths, loop.decision.ks, loop.decision.drafters


@dataclass(slots=True)
class _Throughput:
    """Means of tokens and seconds over the last steps of a kind."""

    tokens: float = 0.0
    seconds: float = 0.0
    seen: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0 if no step was seen."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """Take in a step; a stall counts for a few mean steps."""
        if seconds <= 0:
            return
        self.seen += 1
        rate = max(MIN_RATE, 1 / self.seen)
        bounded_s = min(seconds, MAX_STALL * self.seconds) if self.seconds else seconds
        self.tokens += rate * (tokens - self.tokens)
        self.seconds += rate * (bounded_s - self.seconds)

    def fade(self, tokens_per_s: float) -> None:
        self.tokens += FADE * (tokens_per_s * self.seconds - self.tokens)


class OverlapSwitch:
    """Switches overlap on when it gains more than a margin, off when it gains nothing.

    Once overlapped steps were seen, measured tokens per second decide: no price knows that two passes at once
    share memory and caches. What is known of overlap fades while it is off, so that it is tried again.
    """

    def __init__(self, *, apart: bool) -> None:
        self.on = False
        self._apart = apart
        self._asked = 0
        self._last_s = 0.0  # clock, tokens and rows at the last answer
        self._last_tokens = 0
        self._last_rows = 0
        self._kinds: dict[tuple[bool, int], _Throughput] = {}  # by (overlapped, bits of the number of rows)

    def ask(self, loop: ClosedLoop, now_s: float) -> bool:
        """Return whether to overlap; compared again every `ASK_EVERY` calls. now_s: by any monotonic clock."""
        self._note(loop, now_s)
        if self._asked % ASK_EVERY == 0:
            predicted = planned_overlap(loop, apart=self._apart, overlapped=self.on)
            serial, overlapped = (self._of(on, self._last_rows) for on in (False, True))
            gain = _gain(predicted.gain, serial, overlapped) if predicted else 0.0
            self.on = gain > (1.0 if self.on else 1.0 + BEGIN_MARGIN)
            if predicted and not self.on:
                overlapped.fade(predicted.gain * serial.tokens_per_s)
        self._asked += 1
        return self.on

    def _of(self, on: bool, rows: int) -> _Throughput:
        return self._kinds.setdefault((on, rows.bit_length()), _Throughput())

    def _note(self, loop: ClosedLoop, now_s: float) -> None:
        """Learn from the step since the last answer, if as many rows ran, without prefill."""
        loops = (loop, loop.second_group) if self.on else (loop,)
        views = [one.view for one in loops if one.view is not None]
        rows, tokens = sum(view.num_rows for view in views), loop.num_tokens
        if rows == self._last_rows and not any(view.prefill.tokens for view in views):
            self._of(self.on, rows).learn(tokens - self._last_tokens, now_s - self._last_s)
        self._last_s, self._last_tokens, self._last_rows = now_s, tokens, rows


def _gain(predicted: float, serial: _Throughput, overlapped: _Throughput) -> float:
    """Return the gain of overlap: the prediction, until enough overlapped steps were seen."""
    if not serial.seen or overlapped.seen < ASK_EVERY:
        return predicted
    return overlapped.tokens_per_s / serial.tokens_per_s
