"""Drafters on the target's device: the host plans and keeps count, a program there drafts.

The host does not know a row's newest tokens when it plans their successors. So it sends a depth and a bound, and
proposes drafts of unknown tokens; the record of the step tells what they were. The text does not depend on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.backend.seam import LateDraft
from paceline.core.nouns import NO_DRAFT, UNCHOSEN, Draft, RowDraft

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.backend.seam import LateProgram, RowView
    from paceline.core.nouns import Batch, Plan, Request, Scores, Verdict
    from paceline.draft.drafter import Needs
    from paceline.draft.request_vocabulary import RequestVocabulary

STEP_TOKENS = 4096  # tokens read in a step for rows that fell behind


class LateDrafter:
    """Drafter of a head or a draft model whose program is on the device; see `Drafter`."""

    def __init__(
        self,
        name: str,
        needs: Needs,
        report: Mapping[str, Any],
        program: LateProgram,
        rows: RowView,
        vocabulary: RequestVocabulary | None = None,
    ) -> None:
        """vocabulary: of a drafter that writes some of the target's tokens only; trails as rows do."""
        self.name, self.needs = name, needs
        self._report, self._program, self._rows = report, program, rows
        self._vocabulary = vocabulary
        self._bound = [0] * rows.num_rows  # committed tokens of each row that the drafter may not have read
        self._read = [0] * rows.num_rows  # tokens that it has read for certain, or never will
        self._hole = [False] * rows.num_rows  # some of a row's first tokens have no taps

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Begin with what the stores hold of the row's cached pages."""
        computed, entries, first = self._rows.computed_len(row), valid_lens.get(self.name, 0), 0
        self._hole[row] = False
        if self.needs.tap_store is not None:
            self._hole[row] = valid_lens[self.needs.tap_store] < computed
            # An entry holds the taps of the token before its own; behind a hole the run begins anew.
            first = computed + 1 if self._hole[row] else 1
        start = first if self._hole[row] else max(entries, first)
        self._read[row] = min(start, self._rows.known_len(row))
        self._bound[row] = self._rows.known_len(row) - self._read[row]
        self._program.admit(row, start, first)

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Have the device draft. The tokens are not known here."""
        wanted = {r.row: min(plan.k(r.row), r.max_drafts) for r in batch.rows if r.samples}
        if self._vocabulary:
            self._vocabulary.follow(wanted)
        room, drafts, behind = STEP_TOKENS, [], {}
        for row in sorted((row for row, k in wanted.items() if k > 0), key=self._bound.__getitem__):
            bound = self._bound[row] if self.needs.stores else 1
            if bound <= room:
                drafts.append(LateDraft(row, wanted[row], bound, plan.stop(row)))
                self._note_read(row, self._rows.known_len(row))
                self._bound[row] = 0
            elif room > 0:
                behind[row] = min(room, self._rows.known_len(row) - self._read[row] - 1)
            room -= min(bound, room)
        behind = {row: count for row, count in behind.items() if count > 0}
        if behind:
            self._program.catch_up(behind)
            for row, count in behind.items():
                self._bound[row] -= count
                self._note_read(row, self._read[row] + count)
        if drafts:
            self._program.draft(drafts)
        for r in batch.rows:  # what this pass may commit
            self._bound[r.row] += 1 + r.max_drafts if r.samples else 0
        depths = {d.row: d.depth for d in drafts}
        return Draft(tuple(_unknown(self.name, depths.get(r.row, 0)) for r in batch.rows))

    def _note_read(self, row: int, count: int) -> None:
        self._read[row] = max(self._read[row], count)

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Nothing to do: the device has trimmed itself."""

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Return a row's leading tokens in the stores; behind a hole they stay private."""
        lens = dict.fromkeys(self.needs.stores, 0 if self._hole[row] else self._read[row])
        if self.needs.tap_store is not None:
            lens[self.needs.tap_store] = 0 if self._hole[row] else self._rows.computed_len(row)
        return lens

    def release(self, row: int) -> None:
        """Forget the row."""
        self._bound[row] = self._read[row] = 0
        if self._vocabulary:
            self._vocabulary.release(row)

    def forget(self) -> None:
        """Nothing is learnt across requests."""

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return {**self._report, "on": "the target's device"}


def _unknown(name: str, count: int) -> RowDraft:
    return RowDraft((UNCHOSEN,) * count, name) if count else NO_DRAFT
