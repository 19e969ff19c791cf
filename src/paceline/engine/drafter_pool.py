"""The drafters of an engine: rows begin and end, drafters come, go and fail."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from paceline.engine.drafters import StepDrafters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.core.request_nouns import Request
    from paceline.draft.drafter import Drafter, OnDevice

log = logging.getLogger(__name__)


class DrafterPool(StepDrafters):
    """The loaded drafters: one that fails costs speculation, never a request."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        vocab_size: int,
        empty_store: Callable[[str], None] = lambda _: None,
    ) -> None:
        """empty_store: called with the name of each store whose drafter has lost its contents."""
        super().__init__(drafters, vocab_size)
        self.num_failures = 0
        self.num_untapped = 0  # cached tokens whose taps no drafter has
        self._empty_store = empty_store
        self._logged: set[str] = set()  # drafters whose failure has been logged

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers after which some drafter reads hidden states, ascending."""
        return tuple(sorted({tap for drafter in self.drafters.values() for tap in drafter.needs.taps}))

    def drop(self, name: str) -> Drafter:
        """Remove a drafter, and return it."""
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

    # Failures ------------------------------------------------------------------------------------

    def _lose_stores(self, drafter: Drafter) -> None:
        self.num_failures += 1
        self._failed_now.add(drafter.name)
        self.forgetful.add(drafter.name)
        self._marked |= {key: 0 for key in self._marked if key[0] in drafter.needs.stores}
        for store in drafter.needs.stores:
            self._empty_store(store)

    def _fail(self, drafter: Drafter, reason: str) -> None:
        self.num_failures += 1
        self._failed_now.add(drafter.name)
        if drafter.name not in self._logged:
            self._logged.add(drafter.name)
            log.warning("drafter %s failed, so its rows decode plainly: %s", drafter.name, reason)
