"""Statistics of an engine: counters that only grow."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.control.online_cost import Predictions
from paceline.engine.count_sums import difference
from paceline.engine.kv_disk import DiskCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import RowDraft


@dataclass(slots=True)
class DraftCounts:
    """Counts of one drafter's tokens. Only positions that the target scored count as verified."""

    drafted: int = 0  # tokens proposed
    verified_at: list[int] = field(default_factory=list)  # [position] tokens scored by the target
    accepted_at: list[int] = field(default_factory=list)  # [position] tokens kept
    beside: int = 0  # tokens of branches that the target scored

    @property
    def verified(self) -> int:
        """Tokens scored by the target, after trimming."""
        return sum(self.verified_at) + self.beside

    @property
    def trimmed(self) -> int:
        """Tokens proposed and not verified."""
        return self.drafted - self.verified

    @property
    def rejected(self) -> int:
        """Tokens verified and not kept: the first that the law refused, and all behind it."""
        return self.verified - self.accepted

    @property
    def accepted(self) -> int:
        """Tokens kept."""
        return sum(self.accepted_at)

    def count(self, num_drafted: int, num_verified: int, num_accepted: int, beside: int = 0) -> None:
        """Add one row's draft. beside: tokens of its branches that were verified."""
        self.drafted += num_drafted + beside
        self.beside += beside
        _bump(self.verified_at, num_verified)
        _bump(self.accepted_at, num_accepted)


@dataclass(slots=True)
class Stats:
    """Counters since the engine began to serve; `since` gives the difference of two snapshots."""

    steps: int = 0
    overlapped_steps: int = 0  # steps of one row group under overlap
    step_s: float = 0.0
    step_core_s: float = 0.0  # processor time of the engine's own thread in steps
    draft_s: float = 0.0
    target_s: float = 0.0  # time of passes, packing of their tokens included
    overlapped_s: float = 0.0  # part of `target_s` and `draft_s` in which host or drafters worked, too
    control_s: float = 0.0  # controller's part of the host time: planning, trimming, learning
    decode_passes: int = 0  # decoding rows, summed over steps; rows whose answer had ended are left out
    decoded_tokens: int = 0  # tokens committed by decode passes, without tokens behind a stop
    requests: int = 0  # requests that got a row
    prompt_tokens: int = 0  # prompt tokens of these requests
    cached_tokens: int = 0  # of `prompt_tokens`: found in the prefix cache
    prefilled_tokens: int = 0  # tokens computed in prefill, those recomputed after a preemption included
    output_tokens: int = 0
    changed_tokens: int = 0  # of `output_tokens`: not the target's own choices, by the law `typical`
    preemptions: int = 0
    resumed_requests: int = 0  # requests whose answers had begun elsewhere
    resumed_tokens: int = 0  # told tokens of these answers, which came with their requests
    drafter_failures: int = 0
    waited_rows: int = 0  # rows that sat out a step as their last outcome was in flight, summed over steps
    untapped_tokens: int = 0  # cached tokens without taps; a head drafts from behind them
    k_histogram: list[int] = field(default_factory=list)  # [k] decode passes that verified k drafts
    drafters: dict[str, DraftCounts] = field(default_factory=dict)
    predictions: Predictions = field(default_factory=Predictions)
    kv_disk: DiskCounts = field(default_factory=DiskCounts)

    @property
    def host_s(self) -> float:
        """Time of the steps spent neither in drafters nor waiting for the target."""
        return self.step_s - self.draft_s - self.target_s + self.overlapped_s

    def snapshot(self) -> Stats:
        """Return a copy that later steps do not change."""
        return deepcopy(self)

    def since(self, earlier: Stats) -> Stats:
        """Return what was added after an earlier snapshot."""
        return difference(self, earlier)

    def count_step(self, target_s: float, overlapped_s: float, *, overlapped: bool) -> None:
        """Add one step with its pass; the caller adds its whole time to `step_s`."""
        self.steps += 1
        self.overlapped_steps += overlapped
        self.target_s += target_s
        self.overlapped_s += overlapped_s

    def count_taken_in(self, num_passes: int, num_tokens: int) -> None:
        """Add the passes without drafts, and all tokens, of rows that `kernels.take_in` took in."""
        if num_tokens:
            _bump_at(self.k_histogram, 0, num_passes)
            self.decode_passes += num_passes
            self.decoded_tokens += num_tokens
            self.output_tokens += num_tokens

    def count_pass(self, proposed: RowDraft, draft: RowDraft, num_accepted: int) -> None:
        """Add one row's decode pass, as its answer does. draft: what was verified of `proposed`."""
        self.decode_passes += 1
        _bump_at(self.k_histogram, len(draft), 1)
        if proposed.drafter is not None:
            if proposed.drafter not in self.drafters:
                self.drafters[proposed.drafter] = DraftCounts()
            counts = self.drafters[proposed.drafter]
            counts.count(len(proposed), len(draft), num_accepted, draft.num_branch_tokens)


def mean_k(histogram: Sequence[int]) -> float | None:
    """Return the drafts that a pass verified on average; None without passes."""
    passes = sum(histogram)
    return sum(k * count for k, count in enumerate(histogram)) / passes if passes else None


def _bump_at(counts: list[int], index: int, more: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += more


def _bump(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for index in range(length):
        counts[index] += 1
