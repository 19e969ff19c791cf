"""Index of prompt pages: how much of a prompt each replica has cached.

It is a guess. The front adds the pages of prompts that it routed, and keeps of each replica as many as its pool
has, least recently used out first. A wrong guess costs a prefill, no more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.prefix_cache import chain_hash, root_hash

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from paceline.core.request_nouns import Request

USUAL_PAGES = 4096  # pages kept of a replica that has not told the size of its pool


def page_hashes(request: Request, told: Sequence[int] = ()) -> tuple[bytes, ...]:
    """Return the hashes of the full pages of a prompt and its told answer.

    The chain is that of `engine/pages.py` without a model's fingerprint, as replicas of a fleet have one model.
    """
    page_hash = root_hash("", request.salt)
    token_ids = (*request.prompt_ids, *request.told, *told)
    found = []
    for start in range(0, len(token_ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page_hash = chain_hash(page_hash, token_ids[start : start + PAGE_TOKENS])
        found.append(page_hash)
    return tuple(found)


class PrefixIndex:
    """Pages by replica, and replicas by page as bits of an integer."""

    def __init__(self) -> None:
        self._pages: dict[str, OrderedDict[Hashable, None]] = {}  # replica -> its pages, least recently used first
        self._bits: dict[str, int] = {}
        self._holders: dict[Hashable, int] = {}

    def add(self, replica: str, hashes: Sequence[Hashable], num_pages: int = USUAL_PAGES) -> None:
        """Note that a replica gets these pages. num_pages: of its pool."""
        if replica not in self._bits:
            used = sum(self._bits.values())
            self._bits[replica] = ~used & (used + 1)  # the lowest bit that no replica has
        bit, pages = self._bits[replica], self._pages.setdefault(replica, OrderedDict())
        for page in reversed(hashes[:num_pages]):  # the first page is of use alone, so it is dropped last
            pages[page] = None
            pages.move_to_end(page)
            self._holders[page] = self._holders.get(page, 0) | bit
        while len(pages) > num_pages:
            self._drop(pages.popitem(last=False)[0], bit)

    def hits(self, hashes: Iterable[Hashable]) -> dict[str, int]:
        """Return how many first pages of a prompt each replica holds, if any."""
        found: dict[str, int] = {}
        left, length = -1, 0
        for length, page in enumerate(hashes):
            still = left & self._holders.get(page, 0)
            if length and still != left:
                found |= {name: length for name, bit in self._bits.items() if bit & left & ~still}
            left = still
            if not left:
                return found
        return found | {name: length + 1 for name, bit in self._bits.items() if left > 0 and bit & left}

    def forget(self, replica: str) -> None:
        """Drop a replica's pages: its process has ended."""
        bit = self._bits.pop(replica, 0)
        for page in self._pages.pop(replica, ()):
            self._drop(page, bit)

    def _drop(self, page: Hashable, bit: int) -> None:
        left = self._holders[page] & ~bit
        if left:
            self._holders[page] = left
        else:
            del self._holders[page]
