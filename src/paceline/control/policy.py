"""Seam of control: a policy's input, its answer, and what it learns from, as arrays.

The same policies run in the engine and in the simulator.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, Draft, RowDraft, Stop, Verdict

    Count = int | NDArray[int64]  # of one pass, or of each of several

NONE = -1  # index in place of a drafter: the row decodes plainly
MIN_PLAIN_TOKENS = 1e-9  # least tokens of a step without drafts, as speedups divide by them


@noun
class Work:
    """Work of one target pass, or of each of several."""

    tokens: Count  # token rows: newest tokens, drafts and prefill
    unscored: Count = 0  # prefill tokens among them whose logits are not wanted
    kv_tokens: Count = 0  # cached keys that are read, each row's counted once
    pairs: Count = 0  # (token row, key) pairs of attention

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.unscored + other.unscored,
            self.kv_tokens + other.kv_tokens,
            self.pairs + other.pairs,
        )

    @property
    def as_ints(self) -> tuple[int, int, int, int]:
        """The four counts of one pass, as compiled calls take them."""
        return int(self.tokens), int(self.unscored), int(self.kv_tokens), int(self.pairs)


NO_WORK = Work(0)


@noun
class StepView:
    """State of a step before drafting.

    A preview is the confidence of a lookup drafter in each token that it would propose: [n, depth], NaN behind the
    end of a row's proposal.
    """

    rows: NDArray[int64]  # [n] rows that decode
    lengths: NDArray[int64]  # [n] tokens of each row
    max_drafts: NDArray[int64]  # [n] most drafts that each row may have
    prefill: Work  # work of the prefill chunks in the same pass
    previews: Mapping[int, NDArray[float64]] = field(default_factory=dict)  # drafter -> its preview
    requested: Mapping[int, int] = field(default_factory=dict)  # row -> the drafter that its request names
    num_waiting: int = 0  # requests that have no row yet
    tpot_s: Mapping[int, float] = field(default_factory=dict)  # row -> seconds per token that its request asks for
    unavailable: frozenset[int] = frozenset()  # drafters that failed and are not asked for some steps

    @property
    def num_rows(self) -> int:
        """Number of rows that decode."""
        return len(self.rows)

    @property
    def work(self) -> Work:
        """Work of a pass over these rows without drafts and without prefill."""
        keys = int(self.lengths.sum())
        return Work(self.num_rows, 0, keys, keys)


@noun
class Decision:
    """Drafter and draft length of each row, with what is expected of the step."""

    ks: NDArray[int64]  # [n] drafts of each row, at most
    drafters: NDArray[int64]  # [n] index of a drafter, or NONE
    seconds: float = 0.0  # expected duration of the step; 0: nothing was predicted
    tokens: float = 0.0  # expected number of tokens committed
    speedup: float = 1.0  # expected tokens per second, relative to a step without drafts
    prefill_tokens: int | None = None  # most prefill tokens in the pass; None: no limit
    retired: tuple[int, ...] = ()  # drafters that are never asked again from this step on
    stops: Mapping[int, Stop] = field(default_factory=dict)  # row -> rule that ends its drafting before `ks`
    budget: int | None = None  # drafts that a device verifies, the likeliest of all; None: all


@noun
class Outcomes:
    """Outcome of one step, as arrays over the rows that decoded."""

    rows: NDArray[int64]  # [n]
    drafters: NDArray[int64]  # [n] index of each row's drafter; NONE where nothing was proposed
    num_verified: NDArray[int64]  # [n] drafts that the target scored
    num_accepted: NDArray[int64]  # [n] drafts that were kept
    draft_s: float
    target_s: float
    host_s: float = 0.0
    confidence: NDArray[float64] | None = None  # [n, depth] of all proposed drafts, NaN where unknown
    wait_s: float = 0.0  # time in which these rows waited for the other group's step
    num_drafted: NDArray[int64] | None = None  # [n] drafts proposed; None: those planned
    touched: tuple[float, ...] = ()  # as `StepTimes.touched`
    failed: tuple[int, ...] = ()  # drafters that were asked and failed: they read nothing
    read_s: float | None = None  # time of reading texts, which `draft_s` is without; None: none was read
    num_own: NDArray[int64] | None = None  # [n] verified drafts without those that a grammar forced; None: all

    @property
    def step_s(self) -> float:
        """Seconds that the step spent on these rows, but for reading texts."""
        return self.draft_s + self.target_s + self.host_s

    @property
    def of_drafters(self) -> tuple[NDArray[int64], NDArray[int64]]:
        """Drafts verified and kept, without those that a grammar forced. [n], [n]"""
        if self.num_own is None:
            return self.num_verified, self.num_accepted
        return self.num_own, np.minimum(self.num_accepted, self.num_own)


@noun
class Drafted:
    """Proposals of all rows, before any of them is verified."""

    rows: NDArray[int64]  # [n] rows that decode, in the order of the batch
    drafters: NDArray[int64]  # [n]
    ks: NDArray[int64]  # [n] tokens proposed
    confidence: NDArray[float64]  # [n, depth], NaN where unknown


@noun
class Allocation:
    """Draft length of each row, with what is expected of the step."""

    ks: NDArray[int64]  # [n]
    tokens: float  # committed, the target's own included, weighted
    seconds: float  # prefill left out
    plain_tokens: float  # of the same step without drafts
    plain_seconds: float

    @property
    def speedup(self) -> float:
        """Tokens per second, relative to the step without drafts."""
        return self.tokens * self.plain_seconds / (self.plain_tokens * self.seconds) if self.seconds else 1.0


def plain(view: StepView) -> Decision:
    """Return the decision to draft nothing."""
    return Decision(np.zeros(view.num_rows, np.int64), np.full(view.num_rows, NONE))


# Arrays of a step, one compiled call each: after a pass, attributes of Python objects are slow to read -----


def drafted_of(batch: Batch, draft: Draft, indices: dict[str, int]) -> Drafted:
    """Return the proposals of decoding rows. indices: drafter by name, else NONE."""
    found, confidence = kernels.draft_arrays(batch.rows, draft.rows, indices, NONE)
    return Drafted(found[0], found[1], found[2], confidence)


def confidence_of(drafts: list[RowDraft]) -> NDArray[float64]:
    """Return the confidence in each draft, NaN behind the end of each row's. [n, longest]"""
    return kernels.confidence_array(drafts)


def outcomes_of(
    batch: Batch,
    proposed: Draft,
    verified: Draft,
    verdict: Verdict,
    indices: dict[str, int],
    seconds: tuple[float, float, float, float],
    touched: tuple[float, ...] = (),
) -> tuple[Outcomes, Work]:
    """Return the outcome of a step, and the work of its prefill chunks.

    indices: as for `drafted_of`. seconds: of drafting, of the target pass, of the host, and of waiting.
    touched: as `StepTimes.touched`.
    """
    draft_s, target_s, host_s, wait_s = seconds
    drafts = proposed.rows
    num_own: NDArray[int64] | None = None
    if proposed.unfitted:
        drafts = tuple(proposed.unfitted.get(i, d) for i, d in enumerate(drafts))
        pairs = zip(batch.rows, drafts, verified.rows, strict=True)
        num_own = np.array([d.num_alike(v.token_ids) for r, d, v in pairs if r.decodes], np.int64)
    arrays, confidence, prefill = kernels.outcome_arrays(
        batch.rows, drafts, verified.rows, verdict.rows, indices, NONE
    )
    rows, drafters, num_drafted = arrays[0], arrays[1], arrays[2]
    num_verified, num_accepted = arrays[3], arrays[4]
    said = confidence if confidence.size else None
    failed = tuple(indices[name] for name in proposed.failed)
    of_rows = rows, drafters, num_verified, num_accepted
    times = draft_s, target_s, host_s
    outcomes = Outcomes(*of_rows, *times, said, wait_s, num_drafted, touched, failed, num_own=num_own)
    return outcomes, Work(*prefill) if prefill[0] else NO_WORK
