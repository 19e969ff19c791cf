"""The page pool: reference counts, the prefix cache, and valid slots of each store.

One page table serves every store (the target's KV, each drafter's KV, the taps): page p holds the same 16 tokens
in each of them. A page is *free*, *held* by at least one row, or *idle*: held by none, published in the prefix
cache and evicted when pages run out, least recently used first. Plain logic over ints; `kv_disk.py` and
`kv_events.py`, if they are there, are told of pages that are published and evicted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.backend.page_bytes import Budget
    from paceline.engine.kv_disk import KvDisk
    from paceline.engine.kv_events import KvEventLog, PageChain


def pages_for(num_tokens: int) -> int:
    """Return the number of pages for `num_tokens`."""
    return -(-num_tokens // PAGE_TOKENS)


def root_hash(fingerprint: str, salt: str) -> bytes:
    """Return a chain's first hash (SHA-256): of the KV's fingerprint and the salt."""
    digest = hashlib.sha256(fingerprint.encode())
    digest.update(b"\0" + salt.encode())
    return digest.digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a page from its parent's and its own 16 tokens (SHA-256)."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


class PagePool:
    """Pages of an engine, with reference counts and an LRU prefix cache.

    `sliding_pages.py` and `window_parts.py` have pools for models with windows.
    """

    window = 0  # tokens that sliding layers of the target see
    slides = False  # True: rows give back what is behind their windows
    budget: Budget | None = None  # memory of pages with window parts

    def __init__(self, num_pages: int, stores: Sequence[str] = (), *, caching: bool = True) -> None:
        self.num_pages = num_pages
        self.caching = caching
        self._free = list(range(num_pages - 1, -1, -1))  # a stack; page 0 is taken first
        self._refs = [0] * num_pages  # rows that hold each page
        self._hash: list[bytes | None] = [None] * num_pages  # of published pages
        self._by_hash: dict[bytes, int] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # least recently used first; values are not used here
        self._valid = {store: [0] * num_pages for store in stores}  # store -> valid slots of each page
        self.disk: KvDisk | None = None
        self.events: KvEventLog | None = None

    @property
    def stores(self) -> tuple[str, ...]:
        """Names of the drafters' stores only: the target's published pages are valid to their end."""
        return tuple(self._valid)

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages held by rows."""
        return self.num_pages - self.num_available

    def take(self, count: int, num_bare: int = 0) -> list[int]:
        """Hand out `count` fresh pages, and `num_bare` without window part; the caller checked `fits`."""
        assert count <= self.num_available
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
            for valid in self._valid.values():
                valid[page] = 0
        return pages

    # What a row takes, which windows change. `past`: leading entries of its page table, behind its window;
    # `num_bare`: last ones, which lack their window part.

    def needed(self, total: int, past: int, found: int, most: int) -> tuple[int, int]:
        """Return the pages that a row takes when admitted, and those without window part.

        total: entries of its page table, `found` of them in the cache. most: of a sliding row in prefill.
        """
        return total - found, 0

    def fits(self, count: int, num_bare: int) -> bool:
        """Return True if there is room for so many pages, with and without window part."""
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

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the cached pages of a hash chain's longest published prefix, held for the caller."""
        pages: list[int] = []
        for page_hash in hashes if self.caching else ():
            page = self._by_hash.get(page_hash)
            if page is None:
                break
            self._idle.pop(page, None)
            self._refs[page] += 1
            pages.append(page)
        return pages

    def match_window(self, hashes: Sequence[bytes]) -> tuple[int, list[int]]:
        """Find and hold the longest prefix whose pages that matter are cached.

        Returns how many of its pages are behind the window, and its page table.
        """
        return 0, self.match(hashes)

    def publish(self, page: int, page_hash: bytes, chain: PageChain | None = None, index: int = 0) -> None:
        """Offer a full, computed page to other requests. A duplicate stays private.

        chain: the text of which this is the page at `index`; events need it.
        """
        if not self.caching or self._hash[page] is not None or page_hash in self._by_hash:
            return
        self._hash[page] = page_hash
        self._by_hash[page_hash] = page
        if self.disk is not None:
            self.disk.offer(page, page_hash)
        if self.events is not None:
            assert chain is not None, "events tell a page's tokens"
            self.events.stored(page_hash, chain, index)

    def mark_valid(self, store: str, pages: Sequence[int], num_tokens: int, start: int = 0) -> None:
        """Record that a store holds a row's first `num_tokens` tokens; the first `start` are recorded."""
        valid = self._valid[store]
        for index in range(start // PAGE_TOKENS, pages_for(num_tokens)):
            filled = min(PAGE_TOKENS, num_tokens - index * PAGE_TOKENS)
            valid[pages[index]] = max(valid[pages[index]], filled)

    def valid_len(self, store: str, pages: Sequence[int]) -> int:
        """Return the leading tokens of these pages that a store holds without a hole."""
        total = 0
        for page in pages:
            filled = self._valid[store][page]
            total += filled
            if filled < PAGE_TOKENS:
                break
        return total

    def valid_lens(self, pages: Sequence[int]) -> dict[str, int]:
        """Return `valid_len` for every store."""
        return {store: self.valid_len(store, pages) for store in self._valid}

    def empty_store(self, store: str) -> None:
        """Mark a store as empty, as its drafter has lost it."""
        self._valid[store] = [0] * self.num_pages

    def drop_store(self, store: str) -> None:
        """Remove the store of a drafter that is unloaded."""
        del self._valid[store]

    def forget(self) -> None:
        """Empty the prefix cache; held pages become private. What is on disk stays there."""
        if self.disk is not None:
            for page in self._by_hash.values():
                self.disk.withdraw(page)
        self._free.extend(self._idle)
        self._idle.clear()
        self._by_hash.clear()
        self._hash = [None] * self.num_pages
        if self.events is not None:
            self.events.cleared()

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        page_hash = self._hash[page]
        assert page_hash is not None
        del self._by_hash[page_hash]
        self._hash[page] = None
        if self.disk is not None:
            self.disk.withdraw(page)
        if self.events is not None:
            self.events.removed(page_hash)
        return page

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
