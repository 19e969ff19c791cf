"""Prefix caches of a simulated fleet: which replica keeps which pages, by hash.

Each cache is a set in order of last use. An index has the replicas of every page as bits of an integer, so the
replicas that keep a prompt's first pages are found without asking each.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray


class PrefixSets:
    """The caches of all replicas."""

    def __init__(self, num_replicas: int, pages: int) -> None:
        """Take the pages that a replica keeps."""
        self._pages = pages
        self._num_replicas = num_replicas
        self._kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._holders: dict[int, int] = {}  # page -> bits of the replicas that keep it

    def hits(self, prompt: Sequence[int]) -> NDArray[int64]:
        """Return how many of a prompt's first pages each replica keeps. [num_replicas]"""
        found = np.zeros(self._num_replicas, np.int64)
        holders = (1 << self._num_replicas) - 1
        for depth, page in enumerate(prompt):
            still = holders & self._holders.get(page, 0)
            if still != holders:
                if depth:
                    found[self._places(holders & ~still)] = depth
                holders = still
                if not still:
                    return found
        found[self._places(holders)] = len(prompt)
        return found

    def _places(self, bits: int) -> NDArray[int64]:
        raw = np.frombuffer(bits.to_bytes(-(-self._num_replicas // 8), "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(raw, bitorder="little"))

    def use(self, replica: int, prompt: Sequence[int]) -> None:
        """Keep a prompt's pages on a replica, and evict the oldest.

        Of a prompt, the last pages go first.
        """
        kept, bit = self._kept[replica], 1 << replica
        for page in reversed(prompt):
            if page in kept:
                kept.move_to_end(page)
            else:
                kept[page] = None
                self._holders[page] = self._holders.get(page, 0) | bit
        while len(kept) > self._pages:
            self._drop(kept.popitem(last=False)[0], bit)

    def clear(self, replica: int) -> None:
        """Forget the pages of a replica."""
        for page in self._kept[replica]:
            self._drop(page, 1 << replica)
        self._kept[replica].clear()

    def _drop(self, page: int, bit: int) -> None:
        left = self._holders[page] & ~bit
        if left:
            self._holders[page] = left
        else:
            del self._holders[page]
