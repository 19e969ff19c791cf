"""The drafters of an engine: one that fails costs speculation, never a request."""

from __future__ import annotations

import logging
from math import isfinite
from operator import index as integer
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from paceline.control.policy import confidence_of
from paceline.core.nouns import NO_DRAFT, Draft, RowDraft
from paceline.core.tree_drafts import with_most
from paceline.draft.drafter import DrafterUnavailable, StoresLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy import float64, floating
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, Plan, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.core.tree import Branches
    from paceline.draft.drafter import Drafter, Lookup, OnDevice

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_FAILURES = 4  # in a row, then plans leave the drafter out for a while
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # plans; doubled with each further failure
NONE_LEFT_OUT: frozenset[int] = frozenset()


class DrafterPool:
    """Call the drafters and merge their drafts; drop and count wrong or failing ones."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        vocab_size: int,
        empty_store: Callable[[str], None] = lambda _: None,
    ) -> None:
        """empty_store: called with the name of each store whose drafter has lost its contents."""
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.names = tuple(self.drafters)  # control's index of a drafter; stays if others are dropped
        self.num_failures = 0
        self.num_untapped = 0  # cached tokens that no drafter has the taps of
        self._with_stores = [drafter for drafter in drafters if drafter.needs.stores]
        self._vocab_size = vocab_size
        self._empty_store = empty_store
        self._logged: set[str] = set()  # drafters whose failure has been logged
        self._failed_now: set[str] = set()  # drafters that failed since they were last asked to draft
        self._backoff = FailureBackoff()
        self._index = {name: index for index, name in enumerate(self.names)}
        self._previews: dict[str, dict[int, RowDraft]] = {}  # of this step: drafter -> row -> draft
        self._grammar_rows: set[int] = set()
        self._marked: dict[tuple[str, int], int] = {}  # (store, row) -> valid tokens known to the page table

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers after which some drafter reads hidden states, ascending."""
        return tuple(sorted({tap for drafter in self.drafters.values() for tap in drafter.needs.taps}))

    def drop(self, name: str) -> Drafter:
        """Forget a drafter, and return it."""
        drafter = self.drafters.pop(name)
        if drafter.needs.late:
            cast("OnDevice", drafter).close()
        self._previews.pop(name, None)
        self._with_stores = [kept for kept in self._with_stores if kept.name != name]
        self._marked = {(s, row): n for (s, row), n in self._marked.items() if s not in drafter.needs.stores}
        return drafter

    def replace(self, name: str, new: Drafter) -> None:
        """Replace a drafter by a new one while no row is admitted.

        Its place and its index stay.
        """
        self._failed_now.discard(name)
        old = self.drafters[name]
        self.drafters[name] = new
        self._with_stores = [new if kept is old else kept for kept in self._with_stores]

    # Rows begin and end --------------------------------------------------------------------------

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int], cached_len: int = 0) -> None:
        """Tell every drafter of a request in a row.

        valid_lens: leading tokens that each store holds. cached_len: tokens found in the prefix cache.
        """
        if request.params.grammar is not None:
            self._grammar_rows.add(row)
        for drafter in self.drafters.values():
            known = {store: valid_lens[store] for store in drafter.needs.stores}
            self._marked |= {(store, row): length for store, length in known.items()}
            if drafter.needs.tap_store is not None:
                self.num_untapped += cached_len - known[drafter.needs.tap_store]
            self._guard(drafter, drafter.admit, row, request, known)

    def release(self, row: int) -> None:
        """Tell every drafter that a row is given up."""
        for drafter in self.drafters.values():
            self._guard(drafter, drafter.release, row)
        self._grammar_rows.discard(row)

    def forget(self) -> None:
        """Make every drafter drop what it learnt across requests."""
        for drafter in self.drafters.values():
            self._guard(drafter, drafter.forget)

    # Before a plan -------------------------------------------------------------------------------

    def preview(self, rows: Sequence[int], max_drafts: Sequence[int]) -> dict[int, NDArray[float64]]:
        """Ask the lookup drafters for drafts before the plan; return confidence by drafter index.

        max_drafts: [num_rows] drafts that each row may have. `propose` returns these drafts in the same step.
        """
        self._previews = {}
        found: dict[int, NDArray[float64]] = {}
        for name, drafter in self.drafters.items():
            if drafter.needs.instant:
                k = drafter.needs.max_k
                depths = {row: min(k, most) for row, most in zip(rows, max_drafts, strict=True)}
                drafts = {} if self._idle(drafter) else self._guard(drafter, _look, drafter, depths) or {}
                self._previews[name] = drafts
                found[self._index[name]] = confidence_of([drafts.get(row, NO_DRAFT) for row in rows])
        return found

    def _idle(self, drafter: Drafter) -> bool:
        """Return True of a drafter for rows with a grammar while there are none."""
        return drafter.needs.grammar_only and not self._grammar_rows

    def unavailable(self) -> frozenset[int]:
        """Begin a plan; return the indices of the drafters it must leave out, see `FailureBackoff`."""
        return self._backoff.unavailable(self._index)

    # Propose and commit --------------------------------------------------------------------------

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Ask each planned drafter once, and merge. Rows whose draft is unfit draft nothing."""
        rows = [NO_DRAFT] * len(batch.rows)
        planned = {p.drafter for p in plan.rows.values() if p.drafter is not None and p.k > 0}
        for name in sorted(planned & self.drafters.keys()):
            drafter = self.drafters[name]
            own = plan.only(name)
            self._failed_now.discard(name)
            draft = self._previewed(batch, own, name) or self._guard(drafter, drafter.propose, batch, own)
            self._guard(drafter, self._merge, drafter, draft, batch, rows, own)
            self._backoff.note(name, failed=name in self._failed_now)
        asked = any(p.branches for p in plan.rows.values())
        return Draft(tuple(rows), branched=asked and any(d.branches is not None for d in rows))

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

        computed_len: tokens whose target KV is there; a store's tokens beyond are not certain.
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

    def _lose_stores(self, drafter: Drafter) -> None:
        self.num_failures += 1
        self._failed_now.add(drafter.name)
        self._marked |= {key: 0 for key in self._marked if key[0] in drafter.needs.stores}
        for store in drafter.needs.stores:
            self._empty_store(store)

    def _fits(self, drafter: Drafter, draft: RowDraft, max_drafts: int) -> bool:
        token_ids = map(integer, draft.token_ids)
        fits = len(draft) <= max_drafts and (
            drafter.needs.late or all(0 <= token_id < self._vocab_size for token_id in token_ids)
        )
        fits = fits and all(isfinite(c) for c in draft.confidence or ())
        fits = fits and (draft.branches is None or self._are_branches(draft.branches, len(draft)))
        fits = fits and (draft.probs is None or self._are_probs(draft.probs, len(draft)))
        if not fits:
            self._fail(drafter, "it proposed too many tokens, tokens out of range, NaN or ill-shaped chances")
        return fits

    def _are_branches(self, branches: Branches, num_chain: int) -> bool:
        in_range = all(0 <= integer(token_id) < self._vocab_size for token_id in branches.token_ids)
        return in_range and branches.fits(num_chain)

    def _are_probs(self, probs: NDArray[floating], count: int) -> bool:
        return probs.shape == (count, self._vocab_size) and bool(np.isfinite(probs).all())

    def _fail(self, drafter: Drafter, reason: str) -> None:
        self.num_failures += 1
        self._failed_now.add(drafter.name)
        if drafter.name not in self._logged:
            self._logged.add(drafter.name)
            log.warning("drafter %s failed, so its rows decode plainly: %s", drafter.name, reason)


def _look(drafter: Lookup, max_drafts: Mapping[int, int]) -> dict[int, RowDraft]:
    return drafter.preview(max_drafts)


class FailureBackoff:
    """Backoff that leaves a drafter out of plans after repeated failures, longer each time.

    The controller learns nothing from a failure, so without this it would go on planning with the failing drafter.
    """

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}  # of each drafter, since it last drafted
        self._until: dict[str, int] = {}  # number of the plan from which a drafter is asked again
        self._num_plans = 0

    def note(self, name: str, *, failed: bool) -> None:
        """Note that a drafter was asked to draft, and whether it failed."""
        if not failed:
            self._failures.pop(name, None)
            return
        count = self._failures.get(name, 0) + 1
        self._failures[name] = count
        if count >= MAX_FAILURES:
            self._until[name] = self._num_plans + min(FIRST_PAUSE << min(count - MAX_FAILURES, 8), LONGEST_PAUSE)

    def unavailable(self, index: Mapping[str, int]) -> frozenset[int]:
        """Begin a plan; return indices of drafters to leave out. index: name -> index."""
        self._num_plans += 1
        if not self._until:
            return NONE_LEFT_OUT
        self._until = {name: plan for name, plan in self._until.items() if plan > self._num_plans}
        return frozenset(index[name] for name in self._until)
