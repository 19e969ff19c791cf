"""Events of pages that may lose their window parts.

Routers are told of a page while a request can use some prefix through it: one whose last window has all its parts.
So a page behind that window is told of even without its part; a page in it goes with the first part that is lost.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.engine.kv_events import KvEventLog, page_event
from paceline.engine.sliding_pages import most_pages

if TYPE_CHECKING:
    from paceline.engine.kv_events import BlockStored, PageChain
    from paceline.engine.sliding_pages import SlidingPool


@dataclass(slots=True, eq=False)
class TextPage:
    """A published page."""

    page_hash: bytes
    parent: bytes  # hash of the page before it
    event: BlockStored  # the event of this page alone
    index: int  # place in its text
    needs: int  # pages in the window at its end
    there: bool = True  # True if its window part is in memory
    run: int = 0  # unbroken run of pages up to it whose parts are in memory, at most a window's
    told: bool = False


class WindowEvents(KvEventLog):
    """A log that also counts the window parts that are there."""

    def __init__(self, pool: SlidingPool) -> None:
        super().__init__()
        self._pool = pool
        self._most = most_pages(pool.window, 0)  # pages in a window, at most
        self._pages: dict[bytes, TextPage] = {}
        self._after: defaultdict[bytes, set[bytes]] = defaultdict(set)  # hash -> published pages that follow it

    def stored(self, page_hash: bytes, chain: PageChain, index: int) -> None:
        """Note that a page is published, with its window part."""
        parent, needs = chain.hashes[index], index + 1 - self._pool.first_page(index + 1)
        self._pages[page_hash] = TextPage(page_hash, parent, page_event(page_hash, chain, index), index, needs)
        self._after[parent].add(page_hash)
        self._refresh(self._pages[page_hash])

    def lost(self, page_hash: bytes) -> None:
        """Note that a published page has lost its window part."""
        if (page := self._pages.get(page_hash)) is not None:  # otherwise it was published before this log began
            page.there = False
            self._refresh(page)

    def removed(self, page_hash: bytes) -> None:
        """Note that a page is published no more."""
        if (page := self._pages.get(page_hash)) is None:
            return
        self._after[page.parent].remove(page_hash)
        if not self._after[page.parent]:
            del self._after[page.parent]
        self.lost(page_hash)
        if page.told:
            super().removed(page_hash)
        del self._pages[page_hash]

    def cleared(self) -> None:
        """Note that no page can be found."""
        self._pages.clear()
        self._after.clear()
        super().cleared()

    def _refresh(self, first: TextPage) -> None:
        """Count runs from a page on; tell which pages can, or cannot, be found now."""
        todo, seen = [first], list[TextPage]()
        while todo:
            seen.append(page := todo.pop())
            before = self._pages.get(page.parent)
            run = min(before.run + 1 if before else 1, self._most) if page.there else 0
            if run != page.run:
                page.run = run
                todo += [self._pages[name] for name in self._after.get(page.page_hash, ())]
        changed = [page for page in reversed(seen) if self._changes(page)]  # pages behind it are decided first
        parent = self._pages.get(first.parent)
        while parent is not None and self._changes(parent):
            changed.append(parent)
            parent = self._pages.get(parent.parent)
        for page in sorted(changed, key=lambda page: page.index if page.told else -page.index):
            if page.told:
                self.put(deepcopy(page.event))
            else:
                super().removed(page.page_hash)

    def _changes(self, page: TextPage) -> bool:
        """Decide whether a page is told of; return True if that is new."""
        behind = (self._pages[name].told for name in self._after.get(page.page_hash, ()))
        told, page.told = page.told, page.run >= page.needs or any(behind)
        return told != page.told
