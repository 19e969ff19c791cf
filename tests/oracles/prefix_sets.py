"""A slow twin of the fleet simulator's prefix caches: a list of pages for each replica, oldest first."""

from __future__ import annotations


class PlainPrefixSets:
    """Asks every replica about every page."""

    def __init__(self, num_replicas: int, pages: int) -> None:
        self.pages = pages
        self.kept: list[list[int]] = [[] for _ in range(num_replicas)]

    def hits(self, prompt: list[int]) -> list[int]:
        return [next((i for i, page in enumerate(prompt) if page not in kept), len(prompt)) for kept in self.kept]

    def use(self, replica: int, prompt: list[int]) -> None:
        for page in reversed(prompt):
            self.kept[replica] = [p for p in self.kept[replica] if p != page] + [page]
        self.kept[replica] = self.kept[replica][-self.pages :] if self.pages else []

    def clear(self, replica: int) -> None:
        self.kept[replica] = []
