"""The late loop: it launches a step before the last step's outcome is known.

The device keeps the rows and goes on by itself. Beside it the host works from bounds, and takes in each outcome a
step late. So the device waits for the host only where the host's work of a step takes longer than a pass.

    plan, admit, propose, score n      then      judge, commit n - 1      then      flush

Rows that need the host between two passes sit out the step in which their outcome is in flight, and run again in
the next: those whose tokens the host chooses (penalties, filters, log-probabilities, other laws), and those whose
drafters read their newest tokens on the host. Other rows do not wait for them.

Texts do not change: noise depends only on the request and the position, a pass's numbers only on the row.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.core.params import OFF
from paceline.engine.step import StepScores

if TYPE_CHECKING:
    from paceline.backend.target import PendingPass
    from paceline.core.nouns import Batch
    from paceline.engine.request_state import RequestState
    from paceline.engine.step import StepInput, Verbs


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A step whose pass is in flight."""

    drafted: StepInput
    pending: PendingPass


class LateLoop:
    """Launches each step before it takes in the step before; see `Loop`."""

    def __init__(self) -> None:
        self._launched: _Launched | None = None
        self._steps = 0
        self._taken_s = 0.0  # clock at which the last outcome was taken in

    def step(self, engine: Verbs) -> None:
        """Launch a step, then take in the outcome of the step before.

        Where every row waits for that outcome, it is taken in first.
        """
        before, self._launched = self._launched, None
        if before is not None and not _may_launch(engine):
            self._take_in(engine, before)
            before = None
        self._launched = self._launch(engine)
        if self._launched is not None:
            engine.mask(self._launched.drafted)
        if before is not None:
            self._take_in(engine, before)

    def _launch(self, engine: Verbs) -> _Launched | None:
        # Two controllers alternate: each keeps its plan until the outcome is known.
        controller = engine.controller.second_group if self._steps % 2 else engine.controller
        plan = engine.plan(controller=controller)
        batch = engine.admit(plan)
        if not batch.rows:
            return None
        _note_waits(engine, batch)
        waiting = [r for r in engine.scheduler.running if r.waits and r.in_flight > 0]
        engine.count_waits(sum(not r.ended for r in waiting))
        drafted = engine.propose(batch, plan, controller=controller)
        self._steps += 1
        return _Launched(drafted, engine.request(drafted).launch())

    def _take_in(self, engine: Verbs, launched: _Launched) -> None:
        start = perf_counter()
        scores = launched.pending.wait()
        end, drafted, pending = perf_counter(), launched.drafted, launched.pending
        drafting_s = max(drafted.draft_s, pending.draft_s)
        since = max(self._taken_s, drafted.begun_s)
        drafted.host_s = max(0.0, end - since - drafting_s - pending.pass_s)
        self._taken_s = end
        late_s = pending.draft_s if pending.draft_s > drafted.draft_s else 0.0  # the device drafted beside us
        beside_s = max(0.0, pending.pass_s + late_s - (end - start))
        scored = StepScores(scores, pending.pass_s, beside_s, pending.draft_s)
        verdict = engine.judge(drafted, scored)
        engine.commit(drafted, scored, verdict)
        engine.flush()

    def wait(self) -> bool:
        """Wait for the pass in flight; the next step takes in its outcome."""
        if self._launched is not None:
            with suppress(Exception):  # the next step raises the error
                self._launched.pending.wait()
        return self._launched is not None

    def drain(self, engine: Verbs) -> None:
        """Take in the step that was launched."""
        before, self._launched = self._launched, None
        if before is not None:
            self._take_in(engine, before)

    def check(self, engine: Verbs) -> None:
        """Assert that the launched step's rows are in flight once, all others not."""
        open_rows = {r.row for r in self._launched.drafted.batch.rows} if self._launched else set()
        for r in engine.scheduler.running:
            assert r.in_flight == (r.row in open_rows), "a row is in flight twice, or will not be taken in"


def _may_launch(engine: Verbs) -> bool:
    """Return False if every row waits for its outcome and none can be admitted."""
    scheduler = engine.scheduler
    return bool(scheduler.waiting) or any(not (r.waits and r.in_flight) for r in scheduler.open())


def _note_waits(engine: Verbs, batch: Batch) -> None:
    """Note which of the admitted rows need the host between two passes."""
    needs = [d.needs for d in engine.drafting.drafters.values()]
    host_drafts = any(not (n.late or n.grammar_only) for n in needs)  # `grammar_only`: its rows wait in any case
    for admission in batch.admissions:
        state = engine.scheduler.requests[admission.request.request_id]
        state.waits = engine.target.rows.chosen_here(admission.row) or (host_drafts and _drafts(state))


def _drafts(state: RequestState) -> bool:
    asked = state.request.speculation
    return asked is None or asked.draft != OFF
