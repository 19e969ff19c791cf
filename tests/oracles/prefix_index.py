"""Readable twin of `serve/fleet/index.py`: a list of pages for each replica, walked anew at each question."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class SlowPrefixIndex:
    """Pages of each replica, least recently used first."""

    def __init__(self) -> None:
        self.pages: dict[str, list[bytes]] = {}

    def add(self, replica: str, hashes: Sequence[bytes], num_pages: int) -> None:
        """Put the pages behind all others, the prompt's first page last; keep the last `num_pages`."""
        added = list(reversed(hashes[:num_pages]))
        kept = [page for page in self.pages.get(replica, []) if page not in added]
        self.pages[replica] = (kept + added)[-num_pages:]

    def hits(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Count each replica's pages up to the first that it lacks."""
        found = {}
        for replica, pages in self.pages.items():
            count = 0
            while count < len(hashes) and hashes[count] in pages:
                count += 1
            if count:
                found[replica] = count
        return found

    def forget(self, replica: str) -> None:
        """Drop a replica."""
        self.pages.pop(replica, None)
