"""The drafters of an engine, kept at arm's length: one that fails costs speculation, never a request."""

from __future__ import annotations

import logging
from math import isfinite
from operator import index as integer
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from paceline.control.arrays import confidence_of
from paceline.core.nouns import NO_DRAFT, Draft, RowDraft
from paceline.draft.drafter import DrafterUnavailable, StoresLost
from paceline.engine.patience import FailureBackoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy import float64, floating
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, Plan, Request, Scores, Verdict
    from paceline.draft.drafter import Drafter, Lookup

log = logging.getLogger(__name__)
T = TypeVar("T")


class DrafterPool:
    """Calls the drafters and merges their drafts. Wrong or failing drafts become no drafts, and are counted."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        vocab_size: int,
        empty_store: Callable[[str], None] = lambda _: None,
    ) -> None:
        """empty_store: told of each store whose drafter lost it."""
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self._keeping = [drafter for drafter in drafters if drafter.needs.stores]
        self.names = tuple(self.drafters)  # an index of control stays a drafter's, also if others are dropped
        self.num_failures = 0
        self.num_untapped = 0  # cached tokens whose taps nobody took
        self._vocab_size = vocab_size
        self._empty_store = empty_store
        self._told: set[str] = set()  # drafters whose failure has been logged
        self._troubled: set[str] = set()  # those that failed since they were last asked to draft
        self._patience = FailureBackoff()
        self._index = {name: index for index, name in enumerate(self.names)}
        self._offers: dict[str, dict[int, RowDraft]] = {}  # of this step, by drafter and row
        self._marked: dict[tuple[str, int], int] = {}  # (store, row) -> tokens it is known to hold

    @property
    def taps(self) -> tuple[int, ...]:
        """After how many of the target's layers hidden states are wanted."""
        return tuple(sorted({tap for drafter in self.drafters.values() for tap in drafter.needs.taps}))

    def drop(self, name: str) -> Drafter:
        """Let go of a drafter, and return it."""
        drafter = self.drafters.pop(name)
        self._offers.pop(name, None)
        self._keeping = [kept for kept in self._keeping if kept.name != name]
        self._marked = {(s, row): n for (s, row), n in self._marked.items() if s not in drafter.needs.stores}
        return drafter

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int], cached_len: int = 0) -> None:
        """Tell every drafter of a birth, and how many of the `cached_len` tokens its own stores hold already."""
        for drafter in self.drafters.values():
            known = {store: valid_lens[store] for store in drafter.needs.stores}
            self._marked |= {(store, row): length for store, length in known.items()}
            if drafter.needs.tap_store is not None:
                self.num_untapped += cached_len - known[drafter.needs.tap_store]
            self._guard(drafter, drafter.admit, row, request, known)

    def release(self, row: int) -> None:
        """Tell every drafter of a death."""
        for drafter in self.drafters.values():
            self._guard(drafter, drafter.release, row)

    def forget(self) -> None:
        """Make every drafter drop what it learnt across requests."""
        for drafter in self.drafters.values():
            self._guard(drafter, drafter.forget)

    def look(self, rows: Sequence[int], most: Sequence[int]) -> dict[int, NDArray[float64]]:
        """Ask the drafters that cost nothing what they would propose; return their confidence, see `View.offers`.

        most: drafts that each row may have. What was offered is what `propose` gives in the same step.
        """
        self._offers = {}
        found: dict[int, NDArray[float64]] = {}
        for name, drafter in self.drafters.items():
            if drafter.needs.instant:
                k = drafter.needs.max_k
                asked = {row: min(k, m) for row, m in zip(rows, most, strict=True)}
                offers = self._guard(drafter, _look, drafter, asked) or {}
                self._offers[name] = offers
                found[self._index[name]] = confidence_of([offers.get(row, NO_DRAFT) for row in rows])
        return found

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Ask each planned drafter once, and merge. Rows whose draft is unfit draft nothing."""
        rows = [NO_DRAFT] * len(batch.rows)
        planned = {p.drafter for p in plan.rows.values() if p.drafter is not None and p.k > 0}
        for name in sorted(planned & self.drafters.keys()):
            drafter = self.drafters[name]
            own = plan.only(name)
            self._troubled.discard(name)
            draft = self._offered(batch, own, name) or self._guard(drafter, drafter.propose, batch, own)
            self._guard(drafter, self._take, drafter, draft, batch, rows)
            self._patience.note(name, failed=name in self._troubled)
        return Draft(tuple(rows))

    def _take(self, drafter: Drafter, draft: Draft | None, batch: Batch, rows: list[RowDraft]) -> None:
        """Put what fits of a drafter's answer into `rows`. Whatever is wrong with the answer may raise."""
        if draft is None:
            return
        for index, (row_draft, asked) in enumerate(zip(draft.rows, batch.rows, strict=True)):
            if len(row_draft) and self._fits(drafter, row_draft, asked.max_drafts):
                rows[index] = row_draft

    def out(self) -> frozenset[int]:
        """Return the drafters, by their index, that a step is to be planned without, see `View.out`."""
        return self._patience.out(self._index)

    def _offered(self, batch: Batch, plan: Plan, name: str) -> Draft | None:
        """Return what a drafter offered for this step, as far as it was planned; None if it was not asked."""
        offers = self._offers.pop(name, None)
        if offers is None:
            return None
        return Draft(
            tuple(offers.get(r.row, NO_DRAFT).first(min(plan.k(r.row), r.max_drafts)) for r in batch.rows)
        )

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Tell every drafter what was kept."""
        for drafter in self.drafters.values():
            self._guard(drafter, drafter.commit, batch, scores, verdict)

    def newly_valid(self, row: int, most: int) -> Iterator[tuple[str, int, int]]:
        """Yield (store, known before, known now) of a row's tokens, for each store that has grown."""
        for drafter in self._keeping:
            lengths = self._guard(drafter, drafter.valid_lens, row) or {}
            for store, length in lengths.items():
                start, end = self._marked[store, row], min(most, length)
                if end > start:
                    self._marked[store, row] = end
                    yield store, start, end

    def _guard(self, drafter: Drafter, call: Callable[..., T], *arguments: object) -> T | None:
        try:
            return call(*arguments)
        except DrafterUnavailable:
            self._troubled.add(drafter.name)
            return None
        except StoresLost:
            self._lost(drafter)
            return None
        except Exception as error:  # a drafter is never fatal, whatever it raises
            self._failed(drafter, f"{type(error).__name__}: {error}")
            return None

    def _lost(self, drafter: Drafter) -> None:
        """Note that nothing is left of what a drafter held."""
        self.num_failures += 1
        self._troubled.add(drafter.name)
        self._marked |= {key: 0 for key in self._marked if key[0] in drafter.needs.stores}
        for store in drafter.needs.stores:
            self._empty_store(store)

    def _fits(self, drafter: Drafter, draft: RowDraft, max_drafts: int) -> bool:
        token_ids = map(integer, draft.token_ids)
        fits = len(draft) <= max_drafts and all(0 <= token_id < self._vocab_size for token_id in token_ids)
        fits = fits and all(isfinite(c) for c in draft.confidence or ())
        fits = fits and (draft.probs is None or self._are_chances(draft.probs, len(draft)))
        if not fits:
            self._failed(drafter, "it proposed too many tokens, tokens out of range, NaN or ill-shaped chances")
        return fits

    def _are_chances(self, probs: NDArray[floating], count: int) -> bool:
        return probs.shape == (count, self._vocab_size) and bool(np.isfinite(probs).all())

    def _failed(self, drafter: Drafter, reason: str) -> None:
        self.num_failures += 1
        self._troubled.add(drafter.name)
        if drafter.name not in self._told:
            self._told.add(drafter.name)
            log.warning("drafter %s failed, so its rows decode plainly: %s", drafter.name, reason)


def _look(drafter: Lookup, most: Mapping[int, int]) -> dict[int, RowDraft]:
    return drafter.preview(most)
