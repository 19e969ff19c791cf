"""The drafters in a step: previews, drafts, and what was kept.

A drafter that fails costs speculation, never a request. `drafter_pool.py` has what does not happen in every step:
rows begin and end, drafters come, go and fail.
"""

from __future__ import annotations

from math import isfinite
from operator import index as integer
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from paceline.control.policy import confidence_of
from paceline.core.nouns import NO_DRAFT, Draft, RowDraft
from paceline.core.tree_drafts import with_most
from paceline.draft.drafter import DrafterUnavailable, StoresLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, Plan, Scores, Verdict
    from paceline.draft.drafter import Drafter, Lookup

T = TypeVar("T")

NONE_LEFT_OUT: frozenset[int] = frozenset()
MAX_FAILURES = 4  # failures in a row, after which a drafter is left out for a while
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # numbers of plans that leave it out; doubled with each further failure


class StepDrafters:
    """Call the drafters and merge their drafts. Drafts of a drafter that fails are dropped."""

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int) -> None:
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.names = tuple(self.drafters)  # control's index of a drafter: its place here, which stays if others go
        self._with_stores = [drafter for drafter in drafters if drafter.needs.stores]
        self._vocab_size = vocab_size
        self.forgetful: set[str] = set()  # drafters that lost their stores and of which control is yet to be told
        self._failed_now: set[str] = set()  # drafters that failed since they were last asked to draft
        self._backoff = FailureBackoff()
        self._index = {name: index for index, name in enumerate(self.names)}
        self._previews: dict[str, dict[int, RowDraft]] = {}  # previews of this step: drafter -> row -> draft
        self._grammar_rows: set[int] = set()
        self._marked: dict[tuple[str, int], int] = {}  # (store, row) -> valid tokens that the page table knows of

    def _fail(self, drafter: Drafter, reason: str) -> None:
        """Note that a drafter failed."""
        raise NotImplementedError

    def _lose_stores(self, drafter: Drafter) -> None:
        """Note that a drafter lost the contents of its stores."""
        raise NotImplementedError

    # Before a plan -------------------------------------------------------------------------------

    def preview(self, rows: Sequence[int], max_drafts: Sequence[int]) -> dict[int, NDArray[float64]]:
        """Ask the lookup drafters for drafts before the plan; return confidence by drafter index.

        max_drafts: [num_rows] drafts that each row may have. `propose` returns these drafts in the same step.
        """
        found: dict[int, NDArray[float64]] = {}
        for name, drafter in self.drafters.items():
            if drafter.needs.instant:
                bounds = drafter.needs.max_k, rows, max_drafts
                drafts = {} if self._idle(drafter) else self._guard(drafter, _look, drafter, *bounds) or {}
                self._previews[name] = drafts
                found[self._index[name]] = confidence_of([drafts.get(row, NO_DRAFT) for row in rows])
        return found

    def _idle(self, drafter: Drafter) -> bool:
        """Return True if a drafter only serves rows with a grammar, and there are none."""
        return drafter.needs.grammar_only and not self._grammar_rows

    def unavailable(self) -> frozenset[int]:
        """Begin a plan without previews; return the indices of the drafters it must leave out.

        These drafters fail (see `FailureBackoff`) or are unloaded.
        """
        self._previews = {}
        failing = self._backoff.unavailable(self._index) if self._backoff.until else NONE_LEFT_OUT
        if len(self.drafters) == len(self.names):
            return failing
        return failing.union(self._index[name] for name in self.names if name not in self.drafters)

    # Propose and commit --------------------------------------------------------------------------

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Ask each planned drafter once, and merge. Rows whose draft is unfit draft nothing.

        A drafter that failed is not asked while it is left out, even if a fixed K still plans with it.
        """
        rows = [NO_DRAFT] * len(batch.rows)
        planned = {p.drafter for p in plan.rows.values() if p.drafter is not None and p.k > 0}
        for name in sorted((planned & self.drafters.keys()) - self._backoff.until.keys()):
            drafter = self.drafters[name]
            own = plan if len(planned) == 1 else plan.only(name)
            self._failed_now.discard(name)
            draft = self._previewed(batch, own, name) or self._guard(drafter, drafter.propose, batch, own)
            self._guard(drafter, self._merge, drafter, draft, batch, rows, own)
            failed = name in self._failed_now
            if failed or self._backoff.failures:
                self._backoff.note(name, failed=failed)
        asked = any(p.branches for p in plan.rows.values())
        branched = asked and any(d.branches is not None for d in rows)
        return Draft(tuple(rows), branched=branched, failed=frozenset(planned & self._failed_now))

    def _previewed(self, batch: Batch, plan: Plan, name: str) -> Draft | None:
        """Return the planned part of a drafter's preview of this step, or None."""
        drafts = self._previews.pop(name, None)
        if drafts is None:
            return None
        return Draft(
            tuple(drafts.get(r.row, NO_DRAFT).first(min(plan.k(r.row), r.max_drafts)) for r in batch.rows)
        )

    def _merge(
        self, drafter: Drafter, draft: Draft | None, batch: Batch, rows: list[RowDraft], plan: Plan
    ) -> None:
        """Put a drafter's fitting drafts into `rows`. May raise anything if `draft` is ill-formed."""
        if draft is None:
            return
        for index, (row_draft, bound) in enumerate(zip(draft.rows, batch.rows, strict=True)):
            if len(row_draft) and self._fits(drafter, row_draft, bound.max_drafts):
                rows[index] = row_draft
                if row_draft.branches is not None:
                    rows[index] = with_most(row_draft, plan.branches(bound.row))

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Tell every drafter what was kept."""
        for drafter in self.drafters.values():
            if not self._idle(drafter):
                self._guard(drafter, drafter.commit, batch, scores, verdict)

    def newly_valid(self, row: int, computed_len: int) -> Iterator[tuple[str, int, int]]:
        """Yield (store, known before, known now) of a row for each store that grew.

        computed_len: tokens whose target KV is there; tokens of a store beyond them are not certain.
        """
        for drafter in self._with_stores:
            lengths = self._guard(drafter, drafter.valid_lens, row) or {}
            for store, length in lengths.items():
                start, end = self._marked[store, row], min(computed_len, length)
                if end > start:
                    self._marked[store, row] = end
                    yield store, start, end

    # Failures ------------------------------------------------------------------------------------

    def _guard(self, drafter: Drafter, call: Callable[..., T], *arguments: object) -> T | None:
        """Call a drafter; note any failure and return None for it."""
        try:
            return call(*arguments)
        except DrafterUnavailable:
            self._failed_now.add(drafter.name)
            return None
        except StoresLost:
            self._lose_stores(drafter)
            return None
        except Exception as error:
            self._fail(drafter, f"{type(error).__name__}: {error}")
            return None

    def _fits(self, drafter: Drafter, draft: RowDraft, max_drafts: int) -> bool:
        fits = len(draft) <= max_drafts and (drafter.needs.late or self._in_range(draft.token_ids))
        fits = fits and all(map(isfinite, draft.confidence or ()))
        if fits and (branches := draft.branches) is not None:
            fits = self._in_range(branches.token_ids) and branches.fits(len(draft))
        if fits and (probs := draft.probs) is not None:
            fits = probs.shape == (len(draft), self._vocab_size) and bool(np.isfinite(probs).all())
        if not fits:
            self._fail(drafter, "it proposed too many tokens, tokens out of range, NaN or ill-shaped chances")
        return fits

    def _in_range(self, token_ids: Sequence[int]) -> bool:
        checked = [*map(integer, token_ids)]
        return not checked or 0 <= min(checked) <= max(checked) < self._vocab_size


def _look(drafter: Lookup, k: int, rows: Sequence[int], max_drafts: Sequence[int]) -> dict[int, RowDraft]:
    return drafter.preview({row: min(k, most) for row, most in zip(rows, max_drafts, strict=True)})


class FailureBackoff:
    """Backoff that leaves a drafter out after repeated failures, longer each time.

    No controller learns from a failure, so without this it would go on planning with the failing drafter.
    """

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}  # failures of each drafter since it last drafted
        self.until: dict[str, int] = {}  # drafter -> number of the plan from which it is asked again
        self._num_plans = 0

    def note(self, name: str, *, failed: bool) -> None:
        """Note that a drafter was asked to draft, and whether it failed."""
        if not failed:
            self.failures.pop(name, None)
            return
        count = self.failures.get(name, 0) + 1
        self.failures[name] = count
        if count >= MAX_FAILURES:
            self.until[name] = self._num_plans + min(FIRST_PAUSE << min(count - MAX_FAILURES, 8), LONGEST_PAUSE)

    def unavailable(self, index: Mapping[str, int]) -> frozenset[int]:
        """Begin a plan; return indices of drafters to leave out. index: name -> index."""
        self._num_plans += 1
        self.until = {name: plan for name, plan in self.until.items() if plan > self._num_plans}
        return frozenset(index[name] for name in self.until)
