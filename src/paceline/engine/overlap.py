"""The overlapped loop: while the target scores one group of rows, the drafters draft for the other.

After MineDraft (arXiv 2603.18016): two groups take turns, so nothing is guessed about outcomes and no draft is
wasted. A step waits for one group's pass and begins the other's at once; all the rest is done beside that one: the
first group is judged and committed, then planned, admitted and drafted for again. New requests join the group that
is about to be drafted for; before that, rows of it go over to the other while that has less work. Where there are
not two groups the step is serial.

What a pass in a thread shares with the engine's thread, and who may touch it when:

- A pass reads copies of its rows' tokens, positions and page tables (`Backend.request`) and weights that nobody
  writes. It writes the target's keys and values of its own rows, and taps and choices that nobody else knows of.
- All else belongs to the engine's thread: rows, pages, drafters and their stores, answers. It changes nothing of
  the rows that are being scored until their pass is over.
- A row is in flight at most once, so both groups' rows are different ones. A pass writes pages that only one row
  holds; pages that rows share are full, and are never written again. A drafter reads pages that the rows it drafts
  for hold. So none reads what the target is writing, even one that reads the target's own keys and values.
- Pages for a row's drafts are held from drafting until its outcome: once in a round, for both.

Texts do not change: noise depends on the request and the position, a pass's numbers on the row alone.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.control.controller import StepTimes
from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.pages import pages_for
from paceline.engine.rounds import StepScores
from paceline.engine.serial import SerialLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.backend.pending import PassThread
    from paceline.backend.target import PendingScores, ScoreRequest
    from paceline.engine.engine import Engine
    from paceline.engine.rounds import StepInput
    from paceline.engine.scheduler import RequestState, Scheduler


class OverlappedLoop:
    """Scores one group while it drafts for the other; see `Loop`."""

    def __init__(self, thread: PassThread, wanted: Callable[[Engine], bool]) -> None:
        """thread: runs passes of the target. wanted: asked before each round if two groups are better than one."""
        self._thread, self._wanted = thread, wanted
        self._serial = SerialLoop()
        self._groups = Groups()
        self._scoring: ReadyInput | None = None  # its pass has begun
        self._pending: PendingScores | None = None  # of that pass
        self._ready: ReadyInput | None = None  # drafted for, to be scored next

    def step(self, engine: Engine) -> None:
        """Wait for one group's pass and begin the other's; beside that one, commit the first and draft for it."""
        start = perf_counter()
        if self._scoring is None and not self._begin(engine):
            self._serial.step(engine)
            return
        waiting = perf_counter()
        now, scored = self._finish_pass()
        wait_s = perf_counter() - waiting
        self._begin_pass(engine)
        verdict = engine.judge(now.round, scored)
        engine.commit(now.round, scored, verdict)
        engine.tell()
        engine.learn(now.round, verdict, _times(now, scored, perf_counter() - start - wait_s))
        if self._scoring is not None:
            self._ready = self._draft(engine, now.round.group or 0)
        engine.count_step(now.round, perf_counter() - start, scored.target_s, hidden_s=scored.target_s - wait_s)

    def _begin(self, engine: Engine) -> bool:
        """Draft for one of two groups while nothing is in flight, and for the other beside its pass."""
        for group in (0, 1):
            self._groups.even_out(engine.scheduler, group)
        groups = [r.group for r in engine.scheduler.open()]
        if len(set(groups)) < 2:
            return False
        first = groups[0]  # that of the oldest row
        self._ready = self._draft(engine, first)
        self._begin_pass(engine)
        if self._scoring is not None:
            self._ready = self._draft(engine, 1 - first)
        return self._scoring is not None

    def _begin_pass(self, engine: Engine) -> None:
        self._scoring, self._ready = self._ready, None
        if self._scoring is not None:
            self._pending = engine.target.launch(self._scoring.request, self._thread)

    def _finish_pass(self) -> tuple[ReadyInput, StepScores]:
        assert self._scoring is not None
        assert self._pending is not None
        now, pending = self._scoring, self._pending
        self._scoring = self._pending = None
        scores = pending.wait()
        return now, StepScores(scores, pending.pass_s)

    def _draft(self, engine: Engine, group: int) -> ReadyInput | None:
        """Plan, admit and propose for a group; None if it has no rows, or if all should go together again.

        Where pages ran out, all rows together see who must yield.
        """
        if engine.scheduler.short or not self._wanted(engine):
            return None
        start = perf_counter()
        self._groups.even_out(engine.scheduler, group)
        plan = engine.plan(group)
        batch = engine.admit(plan, group)
        if not batch.rows:
            return None
        now = engine.propose(batch, plan, group)
        request = engine.target.request(now.batch, now.draft)
        return ReadyInput(now, request, start, perf_counter() - start - now.draft_s)

    def rest(self) -> bool:
        """Wait for the pass that was begun; the next step takes in what came of it."""
        if self._pending is not None:
            with suppress(Exception):  # the next step raises it
                self._pending.wait()
        return self._pending is not None

    def check(self, engine: Engine) -> None:
        """Assert what the docstring says of rows and pages."""
        open_rounds = [ready.round for ready in (self._scoring, self._ready) if ready is not None]
        group_of = {r.row: now.group for now in open_rounds for r in now.batch.rows}
        assert len(group_of) == sum(len(now.batch.rows) for now in open_rounds), "a row is in both groups"
        holders = Counter(page for r in engine.scheduler.running for page in r.pages)
        for r in engine.scheduler.running:
            assert r.in_flight == (r.row in group_of), "a row is in flight twice, or nobody will score it"
            assert r.group == group_of.get(r.row, r.group)
            assert len(r.pages) <= pages_for(r.upper_len), "pages are held that no outcome needs"
            first = engine.target.rows.computed_len(r.row) // PAGE_TOKENS if r.in_flight else len(r.pages)
            assert all(holders[page] == 1 for page in r.pages[first:]), "a pass would write a shared page"


@dataclass(frozen=True, slots=True, eq=False)
class ReadyInput:
    """A round that may be scored at once."""

    round: StepInput
    request: ScoreRequest
    begun_s: float  # by the clock
    host_s: float  # that it took to get so far, beside drafting


def _times(now: ReadyInput, scored: StepScores, commit_s: float) -> StepTimes:
    """Return where a round's seconds went, once it is committed; what is left was the other group's.

    commit_s: of host and drafters since its pass.
    """
    own = now.round
    host_s = now.host_s + max(commit_s - own.commit_s, 0.0)
    wait_s = perf_counter() - now.begun_s - own.draft_s - scored.target_s - host_s
    return StepTimes(own.draft_s, scored.target_s, host_s, max(wait_s, 0.0))


class Groups:
    """The two groups: moves rows from one to the other."""

    def __init__(self) -> None:
        self._moved: set[RequestState] = set()  # rows that sat out a round for it, and have not run since

    def even_out(self, scheduler: Scheduler, group: int) -> None:
        """Move rows of the group with more work to the other, the newest first.

        A row that moves waits for a round, so none does twice in a row.
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


def _work(running: RequestState, scheduler: Scheduler) -> int:
    """Return the tokens expected in a row's next pass."""
    if running.decoding:
        return 1 + running.num_drafts
    return min(len(running.token_ids) - running.computed, scheduler.limits.prefill_tokens)
