"""A page pool for targets whose layers all slide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.pages import PagePool, pages_for

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW_STEP = 64  # tokens; kernels begin to read a window at a multiple of this, at or before its first token


def most_pages(window: int, prefill_tokens: int) -> int:
    """Return the most pages of a sliding row in prefill: a window and two chunks."""
    return pages_for(window + WINDOW_STEP) + 2 * pages_for(prefill_tokens) + 1


class SlidingPool(PagePool):
    """A pool whose rows need no more than the pages of a window."""

    def __init__(self, num_pages: int, stores: Sequence[str] = (), *, window: int, caching: bool = True) -> None:
        """window: tokens that a sliding layer sees."""
        super().__init__(num_pages, stores, caching=caching)
        self.window = window

    @property
    def slides(self) -> bool:  # type: ignore[override]
        """True if nobody reads pages behind the window; a drafter with a store may."""
        return not self._valid

    def first_page(self, num_pages: int) -> int:
        """See `PagePool`."""
        first_key = num_pages * PAGE_TOKENS - self.window + 1
        return max(first_key, 0) // WINDOW_STEP * (WINDOW_STEP // PAGE_TOKENS) if self.slides else 0

    def needed(self, total: int, past: int, found: int, most: int) -> tuple[int, int]:
        """See `PagePool`: a window and two chunks of prefill."""
        return min(total - past, most if self.slides else total) - (found - past), 0

    def grow(self, pages: list[int], num_bare: int, most: int) -> int:
        """See `PagePool`."""
        pages.extend(self.take(min(most, self.num_available)))
        return num_bare

    def held(self, pages: list[int], past: int = 0, num_bare: int = 0) -> list[int]:
        """See `PagePool`."""
        return pages[past:]

    def slide(self, pages: list[int], past: int, num_full: int) -> int:
        """See `PagePool`."""
        now = max(past, self.first_page(num_full))
        self.give_back(reversed(self.held(pages[:now], past)))
        return now

    def match_window(self, hashes: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `PrefixCache`: pages behind the window may be gone."""
        if not self.slides:
            return 0, self.match(hashes)
        found = [self._by_hash.get(page_hash) for page_hash in hashes] if self.caching else []
        best = run = 0
        for length, page in enumerate(found, 1):
            run = 0 if page is None else run + 1
            best = length if run >= length - self.first_page(length) else best
        first = self.first_page(best)
        return first, [0] * first + self.match(hashes[first:best])
