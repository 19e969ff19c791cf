"""Hints: tokens that followed where a row's text ended before as it ends now.

Names, numbers and phrases come back in a text, and a small drafter may not guess them. So the row's last tokens,
guesses among them, are looked up in its text. If they occurred before, the token that followed there gets some
logits before the drafter draws: the longer the match, the more. A drafter that is sure of another token still
drafts that. The idea is that of pointer networks (See et al., arXiv 1704.04368), the index suffix decoding's.

The target has scored the drafts behind one that it refuses, too. Its choices there often come in the end, perhaps
a place earlier or later. So each is kept by the one or two tokens before it, and gets some logits where a guess
follows these tokens. This is token recycling (Luo et al., arXiv 2408.08696).

A gain is the logits for a match that is e times as long. The better a drafter guesses by itself, the smaller its
best gain. The gains that drafters declare come from prompts made for training (docs/lab/log.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline import kernels
from paceline.backend.seam import HintRule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.backend.seam import RowView
    from paceline.core.nouns import Batch, Scores, Verdict

MIN_MATCH, MAX_MATCH = 2, 32  # tokens


class RecycledGains(NamedTuple):
    """Logits for the target's choices behind drafts that it refused."""

    pair: float = 0.0  # behind the same two tokens, at most three places from here
    far_pair: float = 0.0  # and anywhere else
    token: float = 0.0  # behind the same token, at most three places from here


NO_GAINS = RecycledGains()
USUAL_GAINS = RecycledGains(pair=4.0, far_pair=1.0, token=2.0)  # of drafters that draft token by token


def rule_on_device(gain: float, recycled: RecycledGains) -> HintRule:
    """Return the rule of these gains for a program on the target's device."""
    return HintRule(MIN_MATCH, MAX_MATCH, gain, *recycled)


class Hints:
    """Hints for a drafter's guesses, by row: from the text and from refused drafts."""

    def __init__(self, rows: RowView, gain: float, recycled: RecycledGains = NO_GAINS) -> None:
        """gain: logits for an e times longer match. Gains of 0 give no hints."""
        self.gain, self.recycled_gains = gain, recycled
        self._rows = rows
        self._drafted: dict[int, list[int]] = {}  # row -> its newest token, and the drafts behind it
        self._recycled: dict[int, kernels.RecycledTokens] = {}

    def pointers(self, rows: Iterable[int]) -> dict[int, kernels.TokenHints]:
        """Return pointers to hinted tokens for the drafts of those rows that have hints."""
        hinted = [row for row in rows if self.gain or row in self._recycled]
        found = {}
        for row, text in zip(hinted, self._rows.texts(hinted), strict=True):
            tail = self._rows.tokens(row)[-MAX_MATCH:]
            found[row] = kernels.TokenHints(text, tail, self.gain, MIN_MATCH, MAX_MATCH)
            if row in self._recycled:
                found[row].add_recycled(self._recycled[row], self.recycled_gains, self._rows.known_len(row))
        return found

    def note(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Take in the drafts of some rows, before they are scored."""
        for row, token_ids in drafts.items() if any(self.recycled_gains) else ():
            self._drafted[row] = [self._rows.tokens(row).item(-1), *token_ids]

    def learn(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Keep the target's choices behind the first draft that it refused.

        Nothing is learnt from a row where the target kept a token that a grammar put in the place of a draft.
        """
        if not self._drafted:
            return
        for index, (r, v) in enumerate(zip(batch.rows, verdict.rows, strict=True)):
            drafted = self._drafted.pop(r.row, None)
            start, end = scores.cu_len[index], scores.cu_len[index + 1]
            kept = v.num_on_chain
            was_drafted = drafted is not None and drafted[1 : kept + 1] == [*v.token_ids[:kept]]
            if drafted and was_drafted and start + kept + 1 < end <= start + len(drafted):
                if r.row not in self._recycled:
                    self._recycled[r.row] = kernels.RecycledTokens()
                place = self._rows.known_len(r.row) - len(v.token_ids)
                said = drafted[: end - start], scores.chosen[start:end]
                self._recycled[r.row].learn(*said, kept, place)

    def release(self, row: int) -> None:
        """Forget a row."""
        self._drafted.pop(row, None)
        self._recycled.pop(row, None)
