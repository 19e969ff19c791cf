"""Notes of a pass, for a request, and of a step, for whoever watches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassNote:
    """One pass of one request: its tokens, its drafts, and expectation against outcome."""

    token_ids: tuple[int, ...]  # kept by the answer; none for a chunk of a prefill
    num_accepted: int  # leading tokens that were drafts; any after them is the target's own
    prefill: bool
    drafter: str | None  # drafter that proposed; None: no draft
    draft_ids: tuple[int, ...]  # [k] verified, in order
    confidence: tuple[float, ...] | None  # [k] as the drafter said
    num_proposed: int  # drafts before trimming
    num_rows: int  # rows of the step
    draft_s: float  # times of the whole step
    target_s: float
    step_s: float
    expected_tokens: float | None = None  # of this row, by a controller that estimates
    expected_s: float | None = None  # predicted time of the step
    plain_s: float | None = None  # estimated time of the same step without drafts
    changed: tuple[int, ...] = ()  # places, among the tokens, of those that the law changed


@dataclass(frozen=True, slots=True)
class StepNote:
    """One step, summed over its rows without salt."""

    end_s: float  # time.time() at its end
    num_rows: int
    num_waiting: int  # requests without a row
    num_tokens: int  # kept
    drafter: str | None  # drafter of most rows; None: no drafts
    k_max: int
    k_mean: float
    step_s: float
    expected_tokens: float | None = None  # of all rows
    expected_s: float | None = None
    plain_tokens: int = 0  # of the step without drafts
    plain_s: float | None = None
