"""What an engine has done so far: counters that only grow, and a few gauges."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields
from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.control.online_cost import StepAccounting
    from paceline.core.nouns import Batch, Draft, RowDraft, Verdict


MOST_ERROR = 2.0  # as a share of a step; all above are one


@dataclass(slots=True)
class DraftCounts:
    """What became of one drafter's tokens. Only positions that were really tested count as verified."""

    drafted: int = 0  # tokens proposed
    verified_at: list[int] = field(default_factory=list)  # [position] tokens scored by the target
    accepted_at: list[int] = field(default_factory=list)  # [position] tokens kept

    @property
    def verified(self) -> int:
        """Tokens scored by the target, after trimming."""
        return sum(self.verified_at)

    @property
    def trimmed(self) -> int:
        """Tokens that were proposed and not verified."""
        return self.drafted - self.verified

    @property
    def rejected(self) -> int:
        """Tokens that were verified and not kept: the first that the law refused, and those behind it."""
        return self.verified - self.accepted

    @property
    def accepted(self) -> int:
        """Tokens kept."""
        return sum(self.accepted_at)

    def count(self, num_drafted: int, num_verified: int, num_accepted: int) -> None:
        """Add one row's draft."""
        self.drafted += num_drafted
        _bump(self.verified_at, num_verified)
        _bump(self.accepted_at, num_accepted)


@dataclass(slots=True)
class Reckoned:
    """What a controller that knows costs makes of the steps so far; all zero without one."""

    step_s: float = 0.0  # of the steps that it predicted
    error_s: float = 0.0  # by which predictions were off, in either direction
    plain_s: float = 0.0  # that the same tokens would have taken without drafts, as estimated
    errors: list[int] = field(default_factory=list)  # [percent] steps whose prediction was off by so much

    def count(self, reckoning: StepAccounting) -> None:
        """Add a step. A prediction that is no number is as wrong as any, and says nothing of what drafts bring."""
        step_s = reckoning.measured_s
        self.step_s += step_s
        error_s = abs(reckoning.predicted_s - step_s)
        if not isfinite(error_s):
            error_s = MOST_ERROR * step_s
        self.error_s += error_s
        percent = round(100 * min(error_s / max(step_s, 1e-9), MOST_ERROR))
        self.errors.extend([0] * (percent + 1 - len(self.errors)))
        self.errors[percent] += 1
        self.plain_s += reckoning.plain_s if isfinite(reckoning.plain_s) else step_s

    @property
    def speedup(self) -> float | None:
        """Estimated speed-up against plain decoding; None if nothing was predicted."""
        return self.plain_s / self.step_s if self.step_s else None

    @property
    def error(self) -> float | None:
        """Share of the time by which predictions were off; None if nothing was predicted. A stall is most."""
        return self.error_s / self.step_s if self.step_s else None

    @property
    def median_error(self) -> float | None:
        """Share of its time by which the prediction of a step in the middle was off, to a per cent."""
        half = sum(self.errors) / 2
        passed = accumulate(self.errors)
        return next((percent / 100 for percent, steps in enumerate(passed) if steps > half), None)


@dataclass(slots=True)
class Stats:
    """Counters since the engine was made; take the difference of two snapshots with `since`."""

    steps: int = 0
    overlapped_steps: int = 0  # of one group of two
    step_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0  # of passes, from when what they read is put together
    hidden_s: float = 0.0  # of passes, during which the host or drafters worked: these seconds are in both
    control_s: float = 0.0  # of the host's time, the controller's: planning, trimming, learning
    decode_passes: int = 0  # rows x steps in which they decoded
    decoded_tokens: int = 0  # tokens these committed, stops applied
    prompt_tokens: int = 0  # of requests that got a row
    cached_tokens: int = 0  # of these, found in the prefix cache
    prefilled_tokens: int = 0  # computed of prompts, and of what a preemption took
    output_tokens: int = 0
    preemptions: int = 0
    drafter_failures: int = 0
    untapped_tokens: int = 0  # cached tokens whose hidden states no head will see: it drafts from behind them
    k_histogram: list[int] = field(default_factory=list)  # [k] decode passes that verified k drafts
    drafters: dict[str, DraftCounts] = field(default_factory=dict)

    reckoned: Reckoned = field(default_factory=Reckoned)

    @property
    def host_s(self) -> float:
        """Time of the steps spent neither drafting nor waiting for the target."""
        return self.step_s - self.draft_s - self.target_s + self.hidden_s

    def snapshot(self) -> Stats:
        """Return a copy that later steps do not change."""
        return deepcopy(self)

    def since(self, earlier: Stats) -> Stats:
        """Return what was added after an earlier snapshot."""
        difference: Stats = _subtract(self, earlier)
        return difference

    def count_step(self, step_s: float, target_s: float, hidden_s: float, *, overlapped: bool) -> None:
        """Add one step."""
        self.steps += 1
        self.overlapped_steps += overlapped
        self.step_s += step_s
        self.target_s += target_s
        self.hidden_s += hidden_s

    def count_pass(self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict) -> None:
        """Add what one step read of prompts, and its drafts: as proposed, and as trimmed for verification."""
        for r, whole, kept, v in zip(batch.rows, proposed.rows, draft.rows, verdict.rows, strict=True):
            if r.decodes:
                self._count_row(whole, len(kept), v.num_accepted)
            else:
                self.prefilled_tokens += r.num_known

    def _count_row(self, proposed: RowDraft, num_verified: int, num_accepted: int) -> None:
        self.decode_passes += 1
        while len(self.k_histogram) <= num_verified:
            self.k_histogram.append(0)
        self.k_histogram[num_verified] += 1
        if proposed.drafter is not None:
            counts = self.drafters.setdefault(proposed.drafter, DraftCounts())
            counts.count(len(proposed), num_verified, num_accepted)


@dataclass(frozen=True, slots=True)
class Gauges:
    """What an engine is doing now."""

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_pages: int
    num_held_pages: int
    num_drafters: int  # loaded
    kv_bytes: int  # all stores


def _bump(counts: list[int], length: int) -> None:
    """Add one to each of the first `length` counts."""
    counts.extend([0] * (length - len(counts)))
    for index in range(length):
        counts[index] += 1


def _subtract(new: Any, old: Any) -> Any:
    if isinstance(new, dict):
        return {key: _subtract(value, old[key]) if key in old else deepcopy(value) for key, value in new.items()}
    if isinstance(new, list):
        return [value - (old[i] if i < len(old) else 0) for i, value in enumerate(new)]
    if hasattr(new, "__dataclass_fields__"):
        pairs = {f.name: _subtract(getattr(new, f.name), getattr(old, f.name)) for f in fields(new)}
        return type(new)(**pairs)
    return new - old
