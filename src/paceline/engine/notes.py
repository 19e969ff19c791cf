"""Notes of passes, for requests that asked and for whoever watches."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from msgspec.structs import replace

from paceline.control.expectation import expectation_of
from paceline.core.nouns import noun
from paceline.core.pass_notes import PassNote, StepNote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.control.expectation import Expectation
    from paceline.control.protocols import Controller, StepTimes
    from paceline.core.nouns import Batch, BatchRow, Draft, RowDraft, RowVerdict, Verdict
    from paceline.core.request_nouns import Outcome, Request

LAST_STEPS = 20  # number of steps that a watcher sees
APART_S = 0.05  # least time between two noted steps: to note every short step takes 3 to 5 % of its time


@noun
class _Step:
    """Facts of a step that all of its notes share."""

    num_rows: int
    times: StepTimes
    expected: Expectation


class NoteBook:
    """Notes that no outcome carries yet, and the last steps while somebody watches."""

    def __init__(self) -> None:
        self.wanted = False  # False: no step needs notes, and the engine asks no further
        self.steps: deque[StepNote] | None = None  # the last ones; None: nobody watches
        self._next_s = 0.0  # when the next step is noted for watchers
        self._open: dict[str, deque[PassNote]] = {}  # notes of each request that asked for them
        self._salted: set[str] = set()  # requests that no watcher may see
        self._ended: list[str] = []  # requests whose last pass may still have to be noted

    def open(self, request: Request) -> None:
        """Begin the notes of a request."""
        self._forget_ended()
        if request.salt:
            self._salted.add(request.request_id)
        if request.speculation is not None and request.speculation.details:
            self._open[request.request_id] = deque()
            self.wanted = True

    def end(self, request_id: str) -> None:
        """Note that a request ends; its last pass is noted after this."""
        self._ended.append(request_id)

    def watch(self, *, on: bool) -> None:
        """Begin or stop noting the last steps, for watchers."""
        if on != (self.steps is not None):
            self.steps = deque(maxlen=LAST_STEPS) if on else None
        self.wanted = on or bool(self._open)

    def wants_step(self) -> bool:
        """Return True if a step that ends now is to be noted."""
        return bool(self._open) or self._is_due()

    def _is_due(self) -> bool:
        """Return True if watchers are to see a step that ends now."""
        return self.steps is not None and time.perf_counter() >= self._next_s

    # After a pass --------------------------------------------------------------------------------

    def add(
        self,
        controller: Controller,
        batch: Batch,
        proposed: Draft,
        draft: Draft,
        verdict: Verdict,
        kept: Sequence[int | None],
        times: StepTimes,
        num_waiting: int,
    ) -> None:
        """Note a step.

        kept: tokens that each row's answer took, None if it had ended before.
        """
        rows = list(zip(batch.rows, proposed.rows, draft.rows, verdict.rows, kept, strict=True))
        seen = [
            (row, scored, count)
            for row, _, scored, _, count in rows
            if count is not None and row.decodes and row.request_id not in self._salted  # what watchers may see
        ]
        if seen or self._open:
            verified = {r.row: len(d) for r, d in zip(batch.rows, draft.rows, strict=True)}
            step = _Step(len(kept), times, expectation_of(controller, verified))
            for row, whole, scored, gained, count in rows:
                notes = self._open.get(row.request_id)
                if notes is not None and count is not None:
                    notes.append(_note(row, whole, scored, gained, count, step))
            if self.steps is not None and seen and self._is_due():
                self._next_s = time.perf_counter() + APART_S
                self.steps.append(_step_note(seen, step, num_waiting))
        self._forget_ended()

    def attach(self, outcomes: list[Outcome]) -> None:
        """Give each outcome the notes of the passes that made its tokens."""
        for index, outcome in enumerate(outcomes):
            notes = self._open.get(outcome.request_id)
            if notes is not None:
                outcomes[index] = replace(outcome, notes=tuple(_taken(notes, outcome)))
                if outcome.finish_reason is not None:
                    del self._open[outcome.request_id]
        self.wanted = self.steps is not None or bool(self._open)

    def _forget_ended(self) -> None:
        if self._ended:
            self._salted.difference_update(self._ended)
            self._ended = []


def _taken(notes: deque[PassNote], outcome: Outcome) -> list[PassNote]:
    """Take the notes that cover an outcome's tokens; the last one takes all."""
    found: list[PassNote] = []
    missing = len(outcome.token_ids)
    while notes and (missing > 0 or outcome.finish_reason is not None):
        found.append(notes.popleft())
        missing -= len(found[-1].token_ids)
    return found


def _note(
    row: BatchRow, proposed: RowDraft, draft: RowDraft, gained: RowVerdict, count: int, step: _Step
) -> PassNote:
    confidence = None if draft.confidence is None else tuple(map(float, draft.confidence))
    times, expected = step.times, step.expected
    draft_ids = draft.token_ids
    if gained.off_chain:  # the path that was kept, then what is left of the chain
        kept = gained.num_accepted
        draft_ids = (*gained.token_ids[:kept], *draft.token_ids[kept:])
    return PassNote(
        token_ids=tuple(map(int, gained.token_ids[:count])),
        num_accepted=min(gained.num_accepted, count),
        prefill=not row.decodes,
        drafter=proposed.drafter,
        draft_ids=tuple(map(int, draft_ids)),
        confidence=confidence,
        num_proposed=len(proposed),
        num_rows=step.num_rows,
        draft_s=times.draft_s,
        target_s=times.target_s,
        step_s=times.total_s,
        expected_tokens=expected.row_tokens.get(row.row) if row.decodes else None,
        expected_s=expected.seconds,
        plain_s=expected.plain_s,
        changed=() if (m := gained.mismatches) is None else tuple(p for p in m.places[: m.num_kept] if p < count),
    )


def _step_note(seen: list[tuple[BatchRow, RowDraft, int]], step: _Step, num_waiting: int) -> StepNote:
    ks = [len(draft) for _, draft, _ in seen]
    drafters = Counter(draft.drafter for _, draft, _ in seen if draft.drafter is not None)
    expected = step.expected
    tokens = [expected.row_tokens.get(row.row) for row, _, _ in seen]
    return StepNote(
        end_s=time.time(),
        num_rows=len(seen),
        num_waiting=num_waiting,
        num_tokens=sum(count for _, _, count in seen),
        drafter=drafters.most_common(1)[0][0] if drafters else None,
        k_max=max(ks),
        k_mean=sum(ks) / len(ks),
        step_s=step.times.total_s,
        expected_tokens=None if None in tokens else sum(t for t in tokens if t is not None),
        expected_s=expected.seconds,
        plain_tokens=len(seen),
        plain_s=expected.plain_s,
    )
