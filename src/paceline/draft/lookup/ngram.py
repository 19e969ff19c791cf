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
from paceline.core.nouns import NO_DRAFT, Draft, RowDraft
from paceline.draft.drafter import MAX_K, Needs
from paceline.draft.late import late_lookup
from paceline.draft.registry import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.seam import RowView
    from paceline.core.nouns import Batch, Plan, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.draft.drafter import Drafter, Target
    from paceline.draft.registry import Loader
    from paceline.model.weights import LoadedModel

MAX_MATCH = 64


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """`ngram:k=4,min=2,max=8`: drafts per step, shortest and longest suffix that counts as a match."""

    name: ClassVar[str] = "ngram"
    k: int = 4
    min: int = 2
    max: int = 8

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)
        bounded(self, "max", 1, MAX_MATCH)
        bounded(self, "min", 1, self.max)

    def num_weights(self, target: LoadedModel) -> int:
        """Return 0: it has no weights."""
        return 0

    @property
    def stands_alone(self) -> bool:
        """False: it has no passes."""
        return False

    @property
    def reads(self) -> str:
        """Return nothing: it reads tokens."""
        return ""

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter: on the target's device if its decoder drafts there."""
        pointers = Pointers(self.min, self.max)
        late = late_lookup(target, self.name, MAX_K, pointers, self.report())
        return late or NgramDrafter(self, target.rows)

    def report(self) -> Mapping[str, Any]:
        """Return facts for the start-up banner."""
        return {"drafter": self.name, "k": self.k, "match": f"{self.min} to {self.max} tokens"}


class NgramDrafter:
    """Proposes the tokens that followed the longest earlier match of a row's suffix."""

    name = NgramConfig.name
    needs = Needs()

    def __init__(self, config: NgramConfig, rows: RowView) -> None:
        self.config = config
        self._rows = rows

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Look up every row that may draft; a row without a match drafts nothing."""
        drafts = []
        for r in batch.rows:
            k = min(plan.k(r.row), r.max_drafts)
            found = lookup(self._rows.tokens(r.row), k, self.config.min, self.config.max) if k else ()
            drafts.append(RowDraft(found, self.name) if len(found) else NO_DRAFT)
        return Draft(tuple(drafts))

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Nothing to prepare."""

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Nothing to trim."""

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """No store."""
        return {}

    def release(self, row: int) -> None:
        """Nothing to release."""

    def forget(self) -> None:
        """Nothing is learnt."""

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return self.config.report()


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
