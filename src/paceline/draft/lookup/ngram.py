"""Prompt lookup: the tokens that followed the last time the text ended like this.

Finds the longest suffix of a row's tokens, of bounded length, that occurred before, and proposes what followed
its latest occurrence. Stateless: a draft is a function of the row's tokens alone. After Saxena's prompt lookup
decoding (2023) and LLMA (arXiv 2304.04487).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paceline.backend.seam import Pointers
from paceline.core.nouns import RowDraft
from paceline.draft.drafter import MAX_K, Needs
from paceline.draft.late import late_lookup
from paceline.draft.lookup.lookup import LookupDrafter, LookupOptions
from paceline.draft.registry import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.seam import RowView
    from paceline.draft.drafter import Drafter, Target
    from paceline.draft.registry import Loader

MAX_MATCH = 64


@dataclass(frozen=True, slots=True)
class NgramConfig(LookupOptions):
    """`ngram:k=4,min=2,max=8`: drafts per step, shortest and longest suffix that counts as a match."""

    name: ClassVar[str] = "ngram"
    min: int = 2
    max: int = 8

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)
        bounded(self, "max", 1, MAX_MATCH)
        bounded(self, "min", 1, self.max)

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter: on the target's device if its decoder drafts there."""
        pointers = Pointers(self.min, self.max)
        late = late_lookup(target, self.name, MAX_K, pointers, self.report())
        return late or NgramDrafter(self, target.rows)

    def report(self) -> Mapping[str, Any]:
        """Return facts for the start-up banner."""
        return {"drafter": self.name, "k": self.k, "match": f"{self.min} to {self.max} tokens"}


class NgramDrafter(LookupDrafter):
    """Proposes the tokens that followed the longest earlier match of a row's suffix."""

    name = NgramConfig.name

    def __init__(self, config: NgramConfig, rows: RowView) -> None:
        super().__init__(config, Needs(), rows)
        self._lens = config.min, config.max

    def preview(self, max_drafts: Mapping[int, int]) -> dict[int, RowDraft]:
        """Look up every row that may draft; a row without a match drafts nothing."""
        found = {row: lookup(self._rows.tokens(row), k, *self._lens) for row, k in max_drafts.items() if k > 0}
        return {row: RowDraft(token_ids, self.name) for row, token_ids in found.items() if token_ids}


def lookup(token_ids: NDArray[int64], k: int, min_len: int, max_len: int) -> Sequence[int]:
    """Return up to k tokens that followed the latest occurrence of the longest suffix.

    token_ids: [length] int64. Where the continuation reaches the end of the text it goes on with its own drafts,
    so that a text that has begun to repeat is followed for all k tokens.
    """
    end = len(token_ids) - 1
    matches = np.flatnonzero(token_ids[:end] == token_ids[end])  # where the suffix's last token stood before
    longest = matches if min_len == 1 else matches[:0]
    for matched in range(2, max_len + 1):
        matches = matches[matches >= matched - 1]
        matches = matches[token_ids[matches - (matched - 1)] == token_ids[end - (matched - 1)]]
        if not matches.size:
            break
        if matched >= min_len:
            longest = matches
    if not longest.size:
        return ()
    start = int(longest[-1]) + 1
    found: list[int] = token_ids[start : start + k].tolist()
    period = len(token_ids) - start
    while len(found) < k:
        found.append(found[len(found) - period])
    return found
