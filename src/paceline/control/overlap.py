"""Is it better to draft for one half of the rows while the other half is scored? The inequality, measured.

All rows together take V + t: the pass with what the host does around it, then drafting. Two groups in turn take
max(V1, t2) + max(V2, t1), if drafters have a device of their own; on the target's own device everything adds up.
As V1 + V2 is V and once more the fixed cost A of a pass, turns pay where drafting takes longer than A: with equal
halves and t <= V, just where t > A. So they do not pay for drafters that cost little, however good they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.cost import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.control.controller import ClosedLoop
    from paceline.control.cost import StepCost

    Part = tuple[NDArray[int64], NDArray[int64], NDArray[int64]]  # lengths, drafts and drafters of some rows

MARGIN = 0.03  # by which turns must promise to win before they begin
ASK_EVERY = 8  # steps between two looks
RATE = 0.02  # of what is known of steps of a kind, that one replaces
MOST_TIMES = 4.0  # of what a step takes, that a single one may count for
FADE = 1 / 256  # of what is known of turns, lost with each look while they are not taken


@dataclass(frozen=True, slots=True)
class Price:
    """What some rows cost."""

    verify_s: float  # V
    draft_s: float  # t


@dataclass(frozen=True, slots=True)
class OverlapCost:
    """What a round of all rows takes, together and in two groups that take turns."""

    whole: Price
    first: Price
    second: Price
    apart: bool  # drafters have a device of their own

    @property
    def serial_s(self) -> float:
        """Seconds of a round of all rows together."""
        return self.whole.verify_s + self.whole.draft_s

    @property
    def turns_s(self) -> float:
        """Seconds of a round of each group, one beside the other."""
        join = max if self.apart else _sum
        a, b = self.first, self.second
        return join(a.verify_s, b.draft_s) + join(b.verify_s, a.draft_s)

    @property
    def gain(self) -> float:
        """Rounds per second in turns against those of all together."""
        return self.serial_s / self.turns_s if self.turns_s else 1.0

    @property
    def fixed_s(self) -> float:
        """A: what a pass costs whatever is in it, which turns pay twice."""
        return self.first.verify_s + self.second.verify_s - self.whole.verify_s

    def explain(self) -> str:
        """Return the inequality with its numbers."""
        join, sign = "max" if self.apart else "sum", "<" if self.gain > 1 else ">="
        a, b, better = self.first, self.second, "turns" if self.gain > 1 else "all rows together"
        pairs = ("V1", a.verify_s, "t2", b.draft_s), ("V2", b.verify_s, "t1", a.draft_s)
        taken = " + ".join(f"{join}({v} {_ms(v_s)}, {t} {_ms(t_s)})" for v, v_s, t, t_s in pairs)
        together = f"V {_ms(self.whole.verify_s)} + t {_ms(self.whole.draft_s)} ms"
        return (
            f"{taken} = {_ms(self.turns_s)} {sign} {_ms(self.serial_s)} = {together}; "
            f"A is {_ms(self.fixed_s)} ms: {better} would be faster"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _sum(a: float, b: float) -> float:
    return a + b


def turns_of(cost: StepCost, parts: Sequence[Part], *, apart: bool) -> OverlapCost:
    """Price two groups of rows, and both together. Prefill is left out: it is the same work either way."""
    lengths, ks, drafters = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    first, second = (_price(cost, part) for part in parts)
    return OverlapCost(_price(cost, (lengths, ks, drafters)), first, second, apart)


def _price(cost: StepCost, part: Part) -> Price:
    lengths, ks, drafters = part
    keys = int(lengths.sum())
    draft_s = cost.drafting_s(ks, drafters)
    return Price(cost.price(Work(len(lengths), 0, keys, keys), lengths, ks, drafters) - draft_s, draft_s)


def planned_turns(loop: ClosedLoop, *, apart: bool, overlapped: bool) -> OverlapCost | None:
    """Price what a loop has planned last: for both groups, or for all rows, every other one of which is a group.

    None if it knows no prices, or if there are not two rows.
    """
    whole = [part for part in map(_planned, (loop, loop.twin) if overlapped else (loop,)) if part is not None]
    parts = whole if overlapped else _halves(whole)
    if loop.cost is None or len(parts) != 2 or not all(len(lengths) for lengths, _, _ in parts):
        return None
    return turns_of(loop.cost, parts, apart=apart)


def _planned(loop: ClosedLoop) -> Part | None:
    if loop.view is None or loop.decision is None:
        return None
    return loop.view.lengths, loop.decision.ks, loop.decision.drafters


def _halves(whole: Sequence[Part]) -> list[Part]:
    return [(lengths[i::2], ks[i::2], drafters[i::2]) for lengths, ks, drafters in whole for i in (0, 1)]


class OverlapSwitch:
    """Says whether two groups take turns: from when it promises to win clearly until it does not win any more.

    What tells is tokens per second by the clock, once turns were taken: two passes at once also share memory and
    caches, which is in no price. What is known of turns fades while they are not taken: they are tried again.
    """

    def __init__(self, *, apart: bool) -> None:
        self.on = False
        self._apart = apart
        self._asked = 0
        self._since = 0.0, 0, 0  # when it last answered, tokens written by then, and rows
        self._rates: dict[tuple[bool, int], _Rate] = {}  # by whether in turns, and the order of the rows' number

    def ask(self, loop: ClosedLoop, now_s: float) -> bool:
        """Answer, with a new look now and then. now_s: by any clock that goes on."""
        self._note(loop, now_s)
        if self._asked % ASK_EVERY == 0:
            turns = planned_turns(loop, apart=self._apart, overlapped=self.on)
            together, in_turns = (self._of(on, self._since[2]) for on in (False, True))
            gain = _gain(turns.gain, together, in_turns) if turns else 0.0
            self.on = gain > (1.0 if self.on else 1.0 + MARGIN)
            if turns and not self.on:
                in_turns.fade(turns.gain * together.tokens_per_s)
        self._asked += 1
        return self.on

    def _of(self, on: bool, rows: int) -> _Rate:
        return self._rates.setdefault((on, rows.bit_length()), _Rate())

    def _note(self, loop: ClosedLoop, now_s: float) -> None:
        """Take in the step since the last answer, if it was of the same rows, without prefill."""
        views = [one.view for one in ((loop, loop.twin) if self.on else (loop,)) if one.view is not None]
        rows, tokens, (since_s, before, rows_before) = sum(v.num_rows for v in views), loop.num_gained, self._since
        if rows == rows_before and not any(view.prefill.tokens for view in views):
            self._of(self.on, rows).learn(tokens - before, now_s - since_s)
        self._since = now_s, tokens, rows


def _gain(promised: float, together: _Rate, in_turns: _Rate) -> float:
    """Return what turns gain: as promised, until some of them were seen."""
    if not together.seen or in_turns.seen < ASK_EVERY:
        return promised
    return in_turns.tokens_per_s / together.tokens_per_s


@dataclass(slots=True)
class _Rate:
    """Tokens and seconds of the last steps of a kind."""

    tokens: float = 0.0
    seconds: float = 0.0
    seen: int = 0

    @property
    def tokens_per_s(self) -> float:
        """0 if none was seen."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """Take in a step; a stall counts for no more than a few of them."""
        if seconds <= 0:
            return
        self.seen += 1
        rate = max(RATE, 1 / self.seen)
        self.tokens += rate * (tokens - self.tokens)
        self.seconds += rate * (
            (min(seconds, MOST_TIMES * self.seconds) if self.seconds else seconds) - self.seconds
        )

    def fade(self, tokens_per_s: float) -> None:
        """Forget some of it for what is promised."""
        self.tokens += FADE * (tokens_per_s * self.seconds - self.tokens)
