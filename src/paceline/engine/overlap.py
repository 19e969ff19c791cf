"""The overlapped loop: while the target scores one group of rows, the drafters draft for the other.

After MineDraft (arXiv 2603.18016): two groups take turns, so nothing is guessed about outcomes and no draft is
wasted. In each step one group is scored and the other planned, admitted and drafted for; each row goes through the
six verbs in two steps. New requests join the group that is about to be drafted for. Before that, rows that are not
in flight go over to the other group while it has less work. Where there are not two groups the step is serial.

What the two threads share, and who may touch it when:

- A pass reads copies of its rows' tokens, positions and page tables (`Backend.prepare`) and weights that nobody
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
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.control.controller import StepTimes
from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.pages import pages_for
from paceline.engine.rounds import Scored
from paceline.engine.serial import SerialLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.engine.engine import Engine
    from paceline.engine.rounds import Round
    from paceline.engine.scheduler import Running, Scheduler
    from paceline.engine.worker import Worker
    from paceline.model.backend import Backend, Prepared


class OverlappedLoop:
    """Scores one group while it drafts for the other; see `Loop`."""

    def __init__(self, worker: Worker, wanted: Callable[[Engine], bool]) -> None:
        """worker: runs the passes. wanted: asked before each round whether two groups are better than one."""
        self._worker, self._wanted = worker, wanted
        self._serial = SerialLoop()
        self._groups = Groups()
        self._ready: Round | None = None  # drafted for in the last step, to be scored in this one

    def step(self, engine: Engine) -> None:
        """Score and commit one group; plan, admit and propose for the other meanwhile."""
        start, drafted_s = perf_counter(), engine.draft_s
        now, self._ready = self._ready or self._begin(engine), None
        if now is None:
            self._serial.step(engine)
            return
        scoring = self._worker.start(partial(_score, engine.target, engine.target.prepare(now.batch, now.draft)))
        try:
            if self._may_draft(engine):
                self._ready = self._draft(engine, 1 - (now.group or 0))
        finally:
            waiting = perf_counter()
            scored = scoring.result()
            wait_s = perf_counter() - waiting
        verdict = engine.judge(now, scored)
        engine.commit(now, scored, verdict)
        end = perf_counter()
        host_s = end - start - wait_s - (engine.draft_s - drafted_s)
        elsewhere_s = end - now.begun_s - now.draft_s - scored.target_s - host_s
        times = StepTimes(now.draft_s, scored.target_s, host_s, max(elsewhere_s, 0.0))
        engine.learn(now, verdict, times, end - start, hidden_s=scored.target_s - wait_s)

    def _begin(self, engine: Engine) -> Round | None:
        """Draft for a group while nothing is in flight, if there are two: for that of the oldest row."""
        if not self._may_draft(engine):
            return None
        for group in (0, 1):
            self._groups.even_out(engine.scheduler, group)
        groups = [r.group for r in engine.scheduler.open()]
        return self._draft(engine, groups[0]) if len(set(groups)) == 2 else None

    def _may_draft(self, engine: Engine) -> bool:
        """Whether the groups go on taking turns; where pages ran out, all rows together see who must yield."""
        return not engine.scheduler.short and self._wanted(engine)

    def _draft(self, engine: Engine, group: int) -> Round | None:
        self._groups.even_out(engine.scheduler, group)
        plan = engine.plan(group)
        batch = engine.admit(plan, group)
        return engine.propose(batch, plan, group) if batch.rows else None

    def check(self, engine: Engine) -> None:
        """Assert what the docstring says of rows and pages, of the round that is ready to be scored."""
        ready = {r.row for r in self._ready.batch.rows} if self._ready else set()
        holders = Counter(page for r in engine.scheduler.running for page in r.pages)
        for r in engine.scheduler.running:
            assert r.in_flight == (r.row in ready), "a row is in flight twice, or nobody will score it"
            assert len(r.pages) <= pages_for(r.upper_len), "pages are held that no outcome needs"
            assert r.row not in ready or self._ready is None or r.group == self._ready.group
            first = int(engine.target.rows.computed[r.row]) // PAGE_TOKENS if r.row in ready else len(r.pages)
            assert all(holders[page] == 1 for page in r.pages[first:]), "a pass would write a shared page"


class Groups:
    """Who runs with whom."""

    def __init__(self) -> None:
        self._moved: set[Running] = set()  # rows that sat out a round for it, and have not run since

    def even_out(self, scheduler: Scheduler, group: int) -> None:
        """Move rows of a group to the other while the group stays the one with more work, the newest first.

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


def _work(running: Running, scheduler: Scheduler) -> int:
    """Return the tokens that a row's next pass is expected to have: of its prompt, or as many as the last one."""
    if running.decoding:
        return 1 + running.num_drafts
    return min(len(running.token_ids) - running.computed, scheduler.limits.prefill_tokens)


def _score(target: Backend, prepared: Prepared) -> Scored:
    start = perf_counter()
    scores = target.run(prepared)
    return Scored(scores, perf_counter() - start)
