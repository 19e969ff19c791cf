"""The prefix cache on disk: full pages are written, and read back instead of computed.

The engine's thread only names pages. One thread copies and writes them, in the order of their publication. Another
thread reads pages for the request that is next. A page is written once, soon after it is full: so it is on disk
before it is evicted, and a crash loses little. Pages are read if reading was faster than computing so far. A
reading is given up where the disk stalls.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import uint8
    from numpy.typing import NDArray

    from paceline.backend.page_bytes import PageBytes
    from paceline.engine.kv_events import PageChain
    from paceline.engine.kv_files import PageFiles

log = logging.getLogger(__name__)

LEAST_PAGES = 4  # fewest pages that are read: to compute fewer takes less than a step
LEARNT_TOKENS = 64  # fewest prefill tokens of a pass whose time tells the cost of computing a token
PAUSE_S = 60.0  # pause of writing after a write has failed
STALL_S = 2.0  # time without a page after which a reading is given up and the rest is computed
CLOSE_S = 3.0  # time for the pages that are still to be written when the engine ends
NEW_SHARE = 0.3  # weight of the newest time in a running mean


@dataclass(slots=True)
class DiskCounts:
    """Counters of pages on disk."""

    pages_written: int = 0
    pages_read: int = 0
    pages_lost: int = 0  # pages evicted before they were written
    failures: int = 0  # writes that failed, pages that were broken, readings that stalled
    read_s: float = 0.0


@dataclass(slots=True, eq=False)
class Reading:
    """Pages on their way from disk for one request."""

    chain: PageChain  # the request's text
    first: int  # index in the text of the first page that is read
    held: list[int]  # pages found in memory, then pages that are read into
    hashes: list[bytes]  # hashes of the pages that are read into
    num_read: int = 0
    stopped: bool = False  # True: the request is no longer the next, or the reading was given up
    moved_s: float = field(default_factory=time.monotonic)  # clock when it began, then when its last page came
    writing: Lock = field(default_factory=Lock)  # taken to write into a page
    done: Event = field(default_factory=Event)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.chain.request.request_id

    def goes_on(self) -> bool:
        """Return True while its pages are held."""
        return not self.stopped

    @property
    def into(self) -> list[int]:
        """Pages that are read into."""
        return self.held[len(self.held) - len(self.hashes) :]


class KvDisk:
    """Writes and reads pages of the target's KV beside the engine."""

    def __init__(self, files: PageFiles, kv: PageBytes) -> None:
        self.files, self.counts = files, DiskCounts()
        self.reading: Reading | None = None  # the one that is open; the scheduler holds its pages
        self._stalled: Reading | None = None  # the reading given up last; the disk may still be busy with it
        self._kv = kv
        self._wanted: OrderedDict[int, bytes] = OrderedDict()  # page -> hash of pages to be written
        self._changed = Condition()  # guards `_wanted`, `_copying` and `_ends_s`
        self._copying: int | None = None  # page whose bytes are being copied, while `_copy` is held
        self._ends_s = inf  # clock at which the writer ends, even with pages left
        self._copy = Lock()
        self._resumes_s = 0.0  # clock before which nothing is written
        self._readings: SimpleQueue[Reading | None] = SimpleQueue()
        self._read_s = 0.0  # mean time to read a page; 0: not known
        self._token_s = inf  # mean time to compute a token; inf: not known
        self._threads = [Thread(target=run, daemon=True, name="kv-disk") for run in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    # The engine's side ---------------------------------------------------------------------------

    def offer(self, page: int, page_hash: bytes) -> None:
        """Queue a published page to be written, unless it is on disk."""
        if page_hash in self.files:
            self.files.touch(page_hash)
        elif time.monotonic() >= self._resumes_s:
            with self._changed:
                self._wanted[page] = page_hash
                self._changed.notify()

    def withdraw(self, page: int) -> None:
        """Give up a page about to be overwritten; wait if it is being copied."""
        with self._changed:
            lost = self._wanted.pop(page, None) is not None
            being_copied = self._copying == page
        self.counts.pages_lost += lost
        if being_copied:
            with self._copy:
                return

    def worth(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading pages should be read rather than computed."""
        if self._stalled is not None and not self._stalled.done.is_set():
            return 0
        count = next((i for i, page_hash in enumerate(hashes) if page_hash not in self.files), len(hashes))
        if count < LEAST_PAGES:
            return 0
        if self._read_s >= PAGE_TOKENS * self._token_s:
            self._read_s *= 0.9  # so that reading is tried again after a while
            return 0
        return count

    def begin(self, chain: PageChain, first: int, held: list[int], hashes: list[bytes]) -> None:
        """Begin to read a text's pages, from `first` on, into the last pages of `held`."""
        self.reading = Reading(chain, first, held, hashes)
        self._readings.put(self.reading)

    def gives_up(self, reading: Reading) -> bool:
        """Give a reading up if the disk stalls; return True if so.

        After this nothing is written into its pages.
        """
        if time.monotonic() < reading.moved_s + STALL_S:
            return False
        with reading.writing:
            reading.stopped = True
        self._stalled = reading
        self.counts.failures += 1
        log.warning("no KV page was read for %.0f s: prefixes are computed until the disk answers", STALL_S)
        return True

    def learn(self, num_prefill: int, num_tokens: int, pass_s: float) -> None:
        """Take in the time of a pass, if its prefill was long enough to tell.

        num_tokens: all tokens of the pass, drafts included.
        """
        if num_prefill >= LEARNT_TOKENS:
            self._token_s = _mean(0.0 if self._token_s == inf else self._token_s, pass_s / num_tokens)

    def close(self) -> None:
        """Write what is left, as far as time allows, and close the folder."""
        with self._changed:
            self._ends_s = time.monotonic() + CLOSE_S
            self._changed.notify()
        self._readings.put(None)
        for thread in self._threads:
            thread.join(2 * CLOSE_S)
        self.files.close()

    # The threads ---------------------------------------------------------------------------------

    def _write(self) -> None:
        buffer = np.empty(self._kv.page_bytes, np.uint8)
        while (page_hash := self._copy_next(buffer)) is not None:
            try:
                self.files.write(page_hash, buffer)
                self.counts.pages_written += 1
            except OSError as error:
                self.counts.failures += 1
                self._resumes_s = time.monotonic() + PAUSE_S
                with self._changed:
                    self._wanted.clear()
                log.warning("no KV pages are written for %.0f s: %s", PAUSE_S, error)

    def _copy_next(self, buffer: NDArray[uint8]) -> bytes | None:
        """Wait for a page and copy it; return its hash, None at the end."""
        with self._changed:
            while not self._wanted and self._ends_s == inf:
                self._changed.wait()
            if not self._wanted or time.monotonic() >= self._ends_s:
                return None
            page, page_hash = self._wanted.popitem(last=False)
            self._copy.acquire()
            self._copying = page
        try:
            self._kv.read_page(page, buffer)
        finally:
            self._copying = None
            self._copy.release()
        return page_hash

    def _read(self) -> None:
        buffer = np.empty(self._kv.page_bytes, np.uint8)
        while (reading := self._readings.get()) is not None:
            start = time.perf_counter()
            try:
                for page, page_hash in zip(reading.into, reading.hashes, strict=True):
                    if self._ends_s < inf or reading.stopped or not self.files.read(page_hash, buffer):
                        break
                    with reading.writing:
                        if not reading.goes_on():  # given up during `read`: the page may be another's by now
                            break
                        self._kv.write_page(page, buffer)
                        reading.num_read, reading.moved_s = reading.num_read + 1, time.monotonic()
            finally:
                self._count(reading, time.perf_counter() - start)
                reading.done.set()

    def _count(self, reading: Reading, read_s: float) -> None:
        self.counts.pages_read += reading.num_read
        self.counts.failures += reading.num_read < len(reading.hashes) and not reading.stopped
        self.counts.read_s += read_s
        if reading.num_read and reading is not self._stalled:
            self._read_s = _mean(self._read_s, read_s / reading.num_read)


def _mean(before: float, newest: float) -> float:
    """Return a running mean; 0 before the first."""
    return newest if not before else before + NEW_SHARE * (newest - before)
