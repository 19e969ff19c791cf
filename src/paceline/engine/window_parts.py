"""Pages of targets of which only some layers slide: each page has a window part.

A row needs all its pages for layers that see all tokens, and only its window for sliding layers. So what sliding
layers hold of page p, its window part, is a thing of its own, named `~p`: it is held, idle and dropped by itself.
Pages without it are *bare*. Both share one budget of memory. Window parts behind the windows of all rows stay in
the prefix cache while there is room: a prefix is found if its window's parts are there, and all its pages.

Free pages that were written keep their memory, which counts as used, until others need it. So drafts that reach
into a page again and again do not ask the system for it each time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from paceline.engine.sliding_pages import SlidingPool
from paceline.engine.window_events import WindowEvents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.backend.page_bytes import Budget
    from paceline.engine.kv_events import KvEventLog, PageChain


class PartedPool(SlidingPool):
    """A pool whose pages may lose their window parts."""

    def __init__(
        self,
        num_pages: int,
        stores: Sequence[str] = (),
        *,
        caching: bool = True,
        window: int,
        budget: Budget,
        drop: Callable[[int], None],
        drop_rest: Callable[[int], None],
    ) -> None:
        """window: tokens that sliding layers see. drop: drops a window part; drop_rest: the rest."""
        super().__init__(num_pages, stores, window=window, caching=caching)
        self.budget: Budget = budget
        self._drop, self._drop_rest = drop, drop_rest
        self._there = [False] * num_pages  # pages whose window part is in memory
        self._part_refs = [0] * num_pages  # rows that hold each window part
        self._idle_parts: OrderedDict[int, int] = OrderedDict()  # page -> clock, least recently used first
        self._freed: dict[int, None] = {}  # free pages that are in memory, freed longest ago first
        self._clock = 0  # number of calls of `give_back`: tells what became idle first
        self._used = 0  # bytes of all that is in memory
        self._held = 0  # bytes of what rows hold

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out, with their window parts."""
        return min(super().num_available, (self.budget.total - self._held) // self.budget.whole)

    @property
    def num_held(self) -> int:
        """Pages held by rows."""
        return self.num_pages - super().num_available

    @property
    def slides(self) -> bool:  # type: ignore[override]
        """True: no drafter reads window parts."""
        return True

    def tell(self) -> KvEventLog:
        """See `PrefixCache`."""
        self.events = WindowEvents(self)
        return self.events

    # Room ----------------------------------------------------------------------------------------

    def fits(self, count: int, num_bare: int) -> bool:
        """See `PagePool`."""
        wanted = count * self.budget.whole + num_bare * self.budget.page
        return self._held + wanted <= self.budget.total and count + num_bare <= super().num_available

    def needed(self, total: int, past: int, found: int, most: int) -> tuple[int, int]:
        """See `PagePool`: all pages, but window parts of the first chunks only."""
        count, _ = super().needed(total, past, found, most)
        return count, total - found - count

    def take(self, count: int, num_bare: int = 0) -> list[int]:
        """See `PagePool`."""
        assert self.fits(count, num_bare)
        pages = self._take_pages(count)
        self._fill(pages)
        return pages + self._take_pages(num_bare, bare=True)

    def grow(self, pages: list[int], num_bare: int, most: int) -> int:
        """See `PagePool`: a row in prefill has its pages, and gets window parts."""
        count = min(most, num_bare, (self.budget.total - self._held) // self.budget.part)
        first = len(pages) - num_bare
        self._fill(pages[first : first + count])
        return num_bare - count

    def _take_pages(self, count: int, *, bare: bool = False) -> list[int]:
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
            for valid in self._valid.values():
                valid[page] = 0
            if page in self._freed:
                del self._freed[page]
            else:
                self._used += self.budget.page
            if bare and self._there[page]:
                self._drop_part(page)
        self._held += count * self.budget.page
        self._make_room()
        return pages

    def _fill(self, pages: Sequence[int]) -> None:
        """Give window parts to pages that their row will write."""
        for page in pages:
            assert not self._part_refs[page]
            self._used += 0 if self._there[page] else self.budget.part
            self._there[page] = True
            self._part_refs[page] = 1
        self._held += len(pages) * self.budget.part
        self._make_room()

    def _make_room(self) -> None:
        """Drop free pages, then evict what has been idle longest, until all fits."""
        while self._used > self.budget.total:
            if self._freed:
                self._drop_freed(next(iter(self._freed)))
                continue
            page, clock = next(iter(self._idle_parts.items()), (-1, self._clock + 1))
            if page >= 0 and clock <= next(iter(self._idle.values()), self._clock):
                self._drop_part(page)
            else:
                self._free.append(self._evict())

    def _drop_part(self, page: int) -> None:
        assert self._there[page] and not self._part_refs[page]
        self._idle_parts.pop(page, None)
        self._there[page] = False
        self._used -= self.budget.part
        if self.disk is not None:
            self.disk.withdraw(page)
        if isinstance(self.events, WindowEvents) and (page_hash := self._hash[page]) is not None:
            self.events.lost(page_hash)
        self._drop(page)

    def _drop_freed(self, page: int) -> None:
        """Drop what a free page still has in memory."""
        if self._there[page]:
            self._drop_part(page)
        del self._freed[page]
        self._used -= self.budget.page
        self._drop_rest(page)

    def _evict(self) -> int:
        page = super()._evict()
        self._clear(page)
        return page

    def _clear(self, page: int) -> None:
        """Note that a page is free, and still in memory."""
        self._idle_parts.pop(page, None)
        self._freed[page] = None

    # Holders -------------------------------------------------------------------------------------

    def held(self, pages: list[int], past: int = 0, num_bare: int = 0) -> list[int]:
        """See `PagePool`: window parts, then pages."""
        return [*(~page for page in pages[past : len(pages) - num_bare]), *pages]

    def slide(self, pages: list[int], past: int, num_full: int) -> int:
        """See `PagePool`: give back window parts, and keep the pages."""
        now = max(past, self.first_page(num_full))
        self.give_back(~page for page in reversed(pages[past:now]))
        return now

    def give_back(self, pages: Iterable[int]) -> None:
        """See `PagePool`: window parts and pages. Published ones stay cached while there is room."""
        named = list(pages)
        self._clock += 1
        private: list[int] = []
        for page in (~name for name in named if name < 0):
            self._part_refs[page] -= 1
            assert self._part_refs[page] >= 0, "a window part was given back twice"
            if not self._part_refs[page]:
                self._held -= self.budget.part
                if self._hash[page] is None:
                    private.append(page)
                else:
                    self._idle_parts[page] = self._clock
        for page in (name for name in named if name >= 0):
            self._refs[page] -= 1
            assert self._refs[page] >= self._part_refs[page], (
                "a page was given back twice, or before its window part"
            )
            if not self._refs[page]:
                self._held -= self.budget.page
                if self._hash[page] is None:
                    self._clear(page)
                    self._free.append(page)
                else:
                    self._idle[page] = self._clock
        for page in private:
            if self._refs[page]:
                self._drop_part(page)

    # The prefix cache ----------------------------------------------------------------------------

    def match_window(self, hashes: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `PrefixCache`: all pages, and the window parts that will be read."""
        found: list[int] = []
        best = run = 0
        for page_hash in hashes if self.caching else ():
            if (page := self._by_hash.get(page_hash)) is None:
                break
            found.append(page)
            run = run + 1 if self._there[page] else 0
            best = len(found) if run >= len(found) - self.first_page(len(found)) else best
        first, pages = self.first_page(best), found[:best]
        for page in pages:
            self._held += 0 if self._refs[page] else self.budget.page
            self._refs[page] += 1
            self._idle.pop(page, None)
        for page in pages[first:]:
            self._held += 0 if self._part_refs[page] else self.budget.part
            self._part_refs[page] += 1
            self._idle_parts.pop(page, None)
        return first, pages

    def publish(self, page: int, page_hash: bytes, chain: PageChain | None = None, index: int = 0) -> None:
        """See `PrefixCache`. A page with its window part takes the place of one without."""
        before = self._by_hash.get(page_hash)
        if before is not None and self._hash[page] is None and self._there[page] and not self._there[before]:
            self._withdraw(before)
        super().publish(page, page_hash, chain, index)

    def _withdraw(self, page: int) -> None:
        """Take a page out of the prefix cache; rows that hold it keep it."""
        if self._idle.pop(page, None) is not None:
            self._clear(page)
            self._free.append(page)
        self._unpublish(page)

    def forget(self) -> None:
        """See `PrefixCache`."""
        for page in list(self._idle_parts):
            self._drop_part(page)
        for page in self._idle:
            self._clear(page)
        super().forget()

    # Checks --------------------------------------------------------------------------------------

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """See `PagePool`; and that the bytes add up."""
        names = [list(held) for held in holders]
        super().check([[name for name in held if name >= 0] for held in names])
        parts = Counter(~name for held in names for name in held if name < 0)
        free, used, held_bytes = set(self._free), 0, 0
        for page in range(self.num_pages):
            there, refs = self._there[page], self._part_refs[page]
            assert refs == parts[page], f"the window part of page {page} is leaked or held too often"
            assert refs <= self._refs[page], f"the window part of page {page} is held without the page"
            assert there or not refs, f"the window part of page {page} is gone, and held"
            idle, freed = page in self._idle_parts, page in self._freed
            assert idle == (there and not refs and not freed), f"the window part of page {page} is lost"
            assert not freed or page in free, f"page {page} is in memory, and neither free nor used"
            held_bytes += (self._refs[page] > 0) * self.budget.page + (refs > 0) * self.budget.part
            used += (freed or page not in free) * self.budget.page + there * self.budget.part
        assert (held_bytes, used) == (self._held, self._used), "the bytes do not add up"
        assert used <= self.budget.total, "more memory is used than there is"
