"""The page pool: which pages are free, held and idle.

One page table serves every store (the target's KV, each drafter's KV, the taps): page p holds the same 16 tokens
in each of them. A page is *free*, *held* by at least one row, or *idle*: held by none, published in the prefix
cache (`prefix_cache.py`) and evicted when pages run out, least recently used first. Plain logic over ints.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.backend.page_bytes import Budget


def pages_for(num_tokens: int) -> int:
    """Return the number of pages for `num_tokens`."""
    return -(-num_tokens // PAGE_TOKENS)


class PagePool(PrefixCache):
    """Pages of an engine, with reference counts and an LRU prefix cache.

    `sliding_pages.py` and `window_parts.py` have pools for models with windows.
    """

    window = 0  # tokens that sliding layers of the target see
    slides = False  # True: rows give back what is behind their windows
    budget: Budget | None = None  # memory of pages with window parts

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages held by rows."""
        return self.num_pages - self.num_available

    def take(self, count: int, num_bare: int = 0) -> list[int]:
        """Hand out `count` fresh pages, and `num_bare` bare ones; the caller has checked `fits`."""
        assert count <= self.num_available
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
            for valid in self._valid.values():
                valid[page] = 0
        return pages

    # What a row takes; pools with windows override these. `past`: number of leading entries of its page table that
    # are behind its window; `num_bare`: number of last entries that lack their window part.

    def first_page(self, num_pages: int) -> int:
        """Return the first page that tokens behind `num_pages` full pages may read."""
        return 0

    def needed(self, total: int, past: int, found: int, most: int) -> tuple[int, int]:
        """Return how many pages a row takes when admitted, and how many bare ones.

        total: entries of its page table, `found` of them in the cache. most: pages of a sliding row in prefill.
        """
        return total - found, 0

    def fits(self, count: int, num_bare: int) -> bool:
        """Return True if there is room for `count` pages and `num_bare` bare ones."""
        return count <= self.num_available

    def grow(self, pages: list[int], num_bare: int, most: int) -> int:
        """Hand up to `most` pages or window parts to a row; return its `num_bare`."""
        raise AssertionError("it has had all since its admission")

    def held(self, pages: list[int], past: int = 0, num_bare: int = 0) -> list[int]:
        """Return what a row holds, as `give_back` takes it."""
        return pages

    def slide(self, pages: list[int], past: int, num_full: int) -> int:
        """Give back what a row no longer reads; return its new `past`."""
        return past

    def give_back(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page. Published pages stay cached while idle."""
        for page in pages:
            self._refs[page] -= 1
            assert self._refs[page] >= 0, "a page was given back twice"
            if self._refs[page]:
                continue
            if self._hash[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = 0

    def mark_valid(self, store: str, pages: Sequence[int], num_tokens: int, start: int = 0) -> None:
        """Record that a store holds a row's first `num_tokens` tokens; `start` are recorded already."""
        valid = self._valid[store]
        for index in range(start // PAGE_TOKENS, pages_for(num_tokens)):
            filled = min(PAGE_TOKENS, num_tokens - index * PAGE_TOKENS)
            valid[pages[index]] = max(valid[pages[index]], filled)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that no page is leaked, held twice by a row, or shared while unpublished."""
        counts = Counter(page for pages in holders for page in pages)
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        for page in range(self.num_pages):
            places = (page in free) + (page in idle) + (self._refs[page] > 0)
            assert places == 1, f"page {page} is in {places} places"
            assert self._refs[page] == counts[page], f"page {page} is leaked or held too often"
            assert counts[page] <= 1 or self.budget or self._hash[page] is not None, (
                f"private page {page} is shared"
            )
            assert page not in idle or self._hash[page] is not None
        assert all(self._hash[page] == h for h, page in self._by_hash.items())
