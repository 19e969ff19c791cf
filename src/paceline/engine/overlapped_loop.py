"""The overlapped loop: the target scores one row group while drafters draft for the other.

After MineDraft (arXiv 2603.18016). Rows are split into two groups that alternate, so nothing is guessed about
outcomes and no draft is wasted. A step waits for one group's pass and launches the other's at once. Everything
else happens beside that pass: the first group is judged and committed, its outcomes are made, and it is planned,
admitted and drafted for again. New requests join the group that is about to be drafted for; before that, rows of
it move to the other group while the other has less work. Where there are not two groups the step is serial.

What a pass in a thread shares with the engine's thread, and who may touch it when:

- A pass reads copies of its rows' tokens, positions and page tables (`Backend.request`) and weights that do
  not change. It writes the target's keys and values of its own rows, and its own taps and choices.
- All else belongs to the engine's thread: rows, pages, drafters and their stores, answers. The engine's thread
  changes nothing of the rows that are being scored until their pass is over.
- A row is in flight at most once, so no row is in both groups. A pass writes pages that only one row
  holds; pages that rows share are full, and are never written again. A drafter reads pages that the rows it drafts
  for hold. So no drafter reads what the target is writing, even one that reads the target's own keys and values.
- Pages for a row's drafts are held from drafting until the outcome: once for each step of its group.

Texts do not change: noise depends only on the request and the position, a pass's numbers only on the row.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.pages import pages_for
from paceline.engine.step import SerialLoop, StepScores

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.backend.pass_thread import PassThread
    from paceline.backend.target import PendingPass, ReadyPass
    from paceline.engine.request_state import RequestState
    from paceline.engine.scheduler import Scheduler
    from paceline.engine.step import StepInput, Verbs


class OverlappedLoop:
    """Scores one group while it drafts for the other; see `Loop`."""

    def __init__(self, thread: PassThread, wanted: Callable[[Verbs], bool]) -> None:
        """thread: runs target passes. wanted: asked before each plan if two groups are better."""
        self._thread, self._wanted = thread, wanted
        self._serial = SerialLoop()
        self._groups = Groups()
        self._scoring: ReadyInput | None = None  # the step whose pass is in flight
        self._pending: PendingPass | None = None  # the pass of `_scoring`
        self._ready: ReadyInput | None = None  # the step that is drafted, and scored next

    def step(self, engine: Verbs) -> None:
        """Wait for a group's pass, launch the other's, then commit and draft beside it."""
        if self._scoring is None and not self._begin(engine):
            self._serial.step(engine)
            return
        drafted, scored = self._wait_pass()
        self._launch_pass(engine)
        verdict = engine.judge(drafted, scored)
        engine.commit(drafted, scored, verdict)
        engine.flush()  # beside the other group's pass: outcomes of this commit
        if self._scoring is not None:
            self._ready = self._draft(engine, drafted.group or 0)

    def _begin(self, engine: Verbs) -> bool:
        """Launch one group's pass and draft for the other beside it; False without two groups."""
        for group in (0, 1):
            self._groups.even_out(engine.scheduler, group)
        groups = [r.group for r in engine.scheduler.open()]
        if len(set(groups)) < 2:
            return False
        first = groups[0]  # the group of the oldest row
        self._ready = self._draft(engine, first)
        self._launch_pass(engine)
        if self._scoring is None:
            return False
        engine.flush()  # beside the first pass: outcomes of a serial step before
        self._ready = self._draft(engine, 1 - first)
        return True

    def _launch_pass(self, engine: Verbs) -> None:
        self._scoring = self._ready
        self._ready = None
        if self._scoring is not None:
            self._pending = self._scoring.request.launch(self._thread)
            engine.mask(self._scoring.drafted)  # before all else beside the pass, which waits for the masks

    def _wait_pass(self) -> tuple[StepInput, StepScores]:
        """Wait for the pass in flight; return what it was launched with, and its scores."""
        assert self._scoring is not None
        assert self._pending is not None
        ready, pending = self._scoring, self._pending
        self._scoring = self._pending = None
        start = perf_counter()
        scores = pending.wait()
        end = perf_counter()
        ready.drafted.idle_s = end - ready.ready_s - pending.pass_s
        return ready.drafted, StepScores(scores, pending.pass_s, pending.pass_s - (end - start), pending.draft_s)

    def _draft(self, engine: Verbs, group: int) -> ReadyInput | None:
        """Plan, admit and propose for a group; None without rows or if all go together.

        When pages run out, all rows go together, so that the newest of both groups is preempted.
        """
        if engine.scheduler.out_of_pages or not self._wanted(engine):
            return None
        self._groups.even_out(engine.scheduler, group)
        plan = engine.plan(group)
        batch = engine.admit(plan, group)
        if not batch.rows:
            return None
        drafted = engine.propose(batch, plan, group)
        request = engine.request(drafted)
        return ReadyInput(drafted, request, perf_counter())

    def wait(self) -> bool:
        """Wait for the pass in flight; the next step takes in its outcome."""
        if self._pending is not None:
            with suppress(Exception):  # the next step raises the error
                self._pending.wait()
        return self._pending is not None

    def drain(self, engine: Verbs) -> None:
        """Score and commit both groups that were drafted for."""
        if self._scoring is None:
            self._launch_pass(engine)
        while self._scoring is not None:
            drafted, scored = self._wait_pass()
            self._launch_pass(engine)
            engine.commit(drafted, scored, engine.judge(drafted, scored))
            engine.flush()

    def check(self, engine: Verbs) -> None:
        """Assert what the module's docstring says of rows and pages."""
        open_steps = [ready.drafted for ready in (self._scoring, self._ready) if ready is not None]
        group_of = {r.row: drafted.group for drafted in open_steps for r in drafted.batch.rows}
        assert len(group_of) == sum(len(drafted.batch.rows) for drafted in open_steps), "a row is in both groups"
        holders = Counter(page for r in engine.scheduler.running for page in engine.scheduler.held(r))
        for r in engine.scheduler.running:
            assert r.in_flight == (r.row in group_of), "a row is in flight twice, or will not be scored"
            assert r.group == group_of.get(r.row, r.group)
            assert len(r.pages) <= pages_for(r.upper_len), "pages are held that no outcome needs"
            first = engine.target.rows.computed_len(r.row) // PAGE_TOKENS if r.in_flight else len(r.pages)
            assert all(holders[page] == 1 for page in r.pages[first:]), "a pass would write a shared page"


@dataclass(frozen=True, slots=True, eq=False)
class ReadyInput:
    """A drafted step that can be scored at any time."""

    drafted: StepInput
    request: ReadyPass
    ready_s: float  # clock at which it was ready


class Groups:
    """Evens out the work of the two groups."""

    def __init__(self) -> None:
        self._moved: set[RequestState] = set()  # rows that have moved and not run since

    def even_out(self, scheduler: Scheduler, group: int) -> None:
        """Move rows out of a group, newest first, while this evens out the work.

        A row that moves misses a step, so it does not move again before it has run.
        """
        self._moved = {r for r in self._moved if r.row >= 0 and not r.in_flight}
        rows = list(scheduler.open())
        surplus = sum(_work(r, scheduler) * (1 if r.group == group else -1) for r in rows)
        for r in reversed(rows):
            gain = 2 * _work(r, scheduler)
            if r.group == group and gain <= surplus and not r.in_flight and r not in self._moved:
                r.group = 1 - group
                surplus -= gain
                self._moved.add(r)


def _work(state: RequestState, scheduler: Scheduler) -> int:
    """Return a row's expected tokens: of its last decode pass, or its next prefill chunk."""
    if state.decoding:
        return 1 + state.num_drafts
    return min(len(state.token_ids) - state.scheduled_len, scheduler.limits.prefill_tokens)
