"""The prefix cache: published pages by hash, and valid slots of stores.

The hash of a page covers all tokens up to its end, as a chain of hashes. `kv_disk.py` and `kv_events.py`, if in
use, are told of pages that are published and evicted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.kv_events import KvEventLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.engine.kv_disk import KvDisk
    from paceline.engine.kv_events import PageChain


def root_hash(fingerprint: str, salt: str) -> bytes:
    """Return a chain's first hash, the SHA-256 of the KV's fingerprint and the salt.

    The byte between the two occurs in no UTF-8 text, so no salt can imitate a fingerprint of other weights.
    """
    digest = hashlib.sha256(fingerprint.encode())
    digest.update(b"\xff" + salt.encode())
    return digest.digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a page from its parent's and its own 16 tokens (SHA-256)."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


class PrefixCache:
    """Pages that requests share by prefix, and what each store holds of them."""

    def __init__(self, num_pages: int, stores: Sequence[str] = (), *, caching: bool = True) -> None:
        self.num_pages = num_pages
        self.caching = caching
        self._free = list(range(num_pages - 1, -1, -1))  # a stack; page 0 is taken first
        self._refs = [0] * num_pages  # rows that hold each page
        self._hash: list[bytes | None] = [None] * num_pages  # hash of each published page
        self._by_hash: dict[bytes, int] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # least recently used first; values: see `PartedPool`
        self._valid = {store: [0] * num_pages for store in stores}  # store -> valid slots of each page
        self.disk: KvDisk | None = None
        self.events: KvEventLog | None = None

    def tell(self) -> KvEventLog:
        """Return a log that is told of pages published and evicted from now on."""
        self.events = KvEventLog()
        return self.events

    # Pages by hash -------------------------------------------------------------------------------

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
        """Find and hold the longest prefix whose pages to be read are all cached.

        Return how many of its pages are behind the window, and its page table.
        """
        return 0, self.match(hashes)

    def publish(self, page: int, page_hash: bytes, chain: PageChain | None = None, index: int = 0) -> None:
        """Offer a full, computed page to other requests. A duplicate stays private.

        chain, index: the text of the page, and its place there; events need them.
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
        self._unpublish(page)
        return page

    def _unpublish(self, page: int) -> None:
        """Make a published page private: no request finds it any more."""
        page_hash = self._hash[page]
        assert page_hash is not None
        del self._by_hash[page_hash]
        self._hash[page] = None
        if self.disk is not None:
            self.disk.withdraw(page)
        if self.events is not None:
            self.events.removed(page_hash)

    # Stores --------------------------------------------------------------------------------------

    @property
    def stores(self) -> tuple[str, ...]:
        """Names of the drafters' stores only: the target's published pages are valid to their end."""
        return tuple(self._valid)

    def valid_len(self, store: str, pages: Sequence[int]) -> int:
        """Return how many leading tokens of these pages a store holds without a hole."""
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
