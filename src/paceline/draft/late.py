"""Drafters on the target's device: the host plans and keeps count, a program there drafts.

The host does not know a row's newest tokens when it plans their successors. So it sends a depth and a bound, and
proposes drafts of unknown tokens; the record of the step tells what they were. The text never depends on drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from paceline.backend.seam import LateDraft
from paceline.core.nouns import NO_DRAFT, UNCHOSEN, Draft, RowDraft
from paceline.draft.drafter import Needs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backend.seam import Decoder, LateDecoder, LateProgram, Pointers, RowView
    from paceline.core.nouns import Batch, BatchRow, Plan, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.draft.drafter import Target
    from paceline.draft.request_vocabulary import RequestVocabulary

STEP_TOKENS = 4096  # tokens read in a step for rows that fell behind


def may_draft_late(decoder: Decoder, target: Target) -> bool:
    """Return True if a decoder drafts on the target's device, as its law allows."""
    late = decoder.capabilities.late and not target.law_needs_probs
    return late and cast("LateDecoder", decoder).serves(target.rows)


def late_decoder(target: Target) -> LateDecoder | None:
    """Return the target's decoder if it offers programs without a model; None: the host drafts."""
    if target.local is None or not may_draft_late(target.local.decoder, target):
        return None
    return cast("LateDecoder", target.local.decoder)


def late_lookup(
    target: Target, name: str, max_k: int, pointers: Pointers, report: Mapping[str, Any]
) -> LateDrafter | None:
    """Return a drafter that looks texts up on the device; None where the host must."""
    decoder = late_decoder(target)
    if decoder is None:
        return None
    needs = Needs(max_k=max_k, stops=True, late=True)
    return LateDrafter(name, needs, report, decoder.late_lookup(target.rows, pointers), target.rows)


class LateDrafter:
    """Drafter whose program is on the target's device; see `Drafter`."""

    def __init__(
        self,
        name: str,
        needs: Needs,
        report: Mapping[str, Any],
        program: LateProgram,
        rows: RowView,
        vocabulary: RequestVocabulary | None = None,
        lag: int = 0,
    ) -> None:
        """vocabulary: of a drafter that writes some target tokens only; it trails as rows do.

        The first of `needs.stores`, if any, has the program's entries. lag: newest tokens without an entry.
        """
        self.name, self.needs = name, needs
        self._report, self.program, self._rows = report, program, rows
        self.vocabulary, self._lag = vocabulary, lag
        self._read = [0] * rows.num_rows  # tokens of each row that were read for certain, or never will be
        self._reads_more: set[int] = set()  # rows that were read up to a length the host is about to learn
        self._hole = [False] * rows.num_rows  # some of a row's first tokens have no taps

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Begin with what the stores hold of the row's cached pages."""
        computed, first = self._rows.computed_len(row), 0
        entries = valid_lens[self.needs.stores[0]] if self.needs.stores else 0
        self._hole[row] = False
        if self.needs.tap_store is not None:
            self._hole[row] = valid_lens[self.needs.tap_store] < computed
            # An entry is made of the taps of the token before its own, or with a lag of its own token's taps.
            # Behind a hole the run begins anew.
            first = (computed if self._hole[row] else 0) + 1 - self._lag
        start = first if self._hole[row] else max(entries, first)
        self._read[row] = min(start, self._rows.known_len(row))
        self._reads_more.discard(row)
        self.program.admit(row, start, first)

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Have the device draft. The tokens are not known here."""
        wanted = [(r, min(plan.k(r.row), r.max_drafts, self.needs.max_k)) for r in batch.rows if r.samples]
        asked = [self._draft(r, k, plan) for r, k in wanted if k > 0]
        if self.vocabulary:
            self.vocabulary.follow([d.row for d in asked])
        ready, behind = self._share_out(asked)
        if behind:
            self.program.catch_up(behind)
            for row, count in behind.items():
                self._read[row] += count
        if ready:
            self.program.draft(ready)
            self._note_read(ready)
        depths = {d.row: d.depth for d in ready}
        return Draft(tuple(_unknown(self.name, depths.get(r.row, 0)) for r in batch.rows))

    def _draft(self, r: BatchRow, k: int, plan: Plan) -> LateDraft:
        longest = r.max_len - 1 - r.max_drafts  # before this pass
        bound = longest - self._read[r.row] if self.needs.stores else 1
        return LateDraft(r.row, k, bound, longest, plan.stop(r.row))

    def _share_out(self, asked: Sequence[LateDraft]) -> tuple[list[LateDraft], dict[int, int]]:
        """Share out the tokens that one step may read.

        Returns the drafts of rows that may be read up to their ends, and how many tokens to read of the others.
        """
        room, ready, behind = STEP_TOKENS, [], {}
        for d in sorted(asked, key=lambda d: d.bound):
            lasts = self._rows.known_len(d.row) - self._lag
            if d.bound <= room:
                ready.append(d)
            elif (count := min(room, lasts - self._read[d.row])) > 0:
                behind[d.row] = count
            room -= min(d.bound, room)
        return ready, behind

    def _note_read(self, drafted: Sequence[LateDraft]) -> None:
        """Note how far rows were read, now that drafting has not failed."""
        for d in drafted:
            known = self._rows.known_len(d.row)
            if d.length == known:
                self._read[d.row] = known - self._lag
            else:
                self._reads_more.add(d.row)

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Learn how far rows were read; the device has trimmed itself."""
        for r in batch.rows:
            if r.row in self._reads_more:
                self._reads_more.discard(r.row)
                self._read[r.row] = self._rows.known_len(r.row) - self._lag

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Return a row's leading tokens in the stores; behind a hole they stay private."""
        lens = dict.fromkeys(self.needs.stores, 0 if self._hole[row] else self._read[row])
        if self.needs.tap_store is not None:
            lens[self.needs.tap_store] = 0 if self._hole[row] else self._rows.computed_len(row)
        return lens

    def release(self, row: int) -> None:
        """Forget the row."""
        self._read[row] = 0
        if self.vocabulary:
            self.vocabulary.release(row)

    def close(self) -> None:
        """End the program on the device; otherwise it would go on taking taps."""
        self.program.close()

    def forget(self) -> None:
        """Nothing is learnt across requests."""

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return {**self._report, "on": "the target's device"}


def _unknown(name: str, count: int) -> RowDraft:
    return RowDraft((UNCHOSEN,) * count, name) if count else NO_DRAFT
