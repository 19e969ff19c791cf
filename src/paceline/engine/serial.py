"""The serial loop: the six verbs one after another, all rows together.

What no plan depends on, as to write down what answers say, is done beside the next pass where one goes on beside
the caller (`Backend.beside`). So that pass is begun first, in the step that takes in the one before.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from paceline.control.controller import StepTimes

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.rounds import Scoring


class SerialLoop:
    """Drafts, then scores; see `Loop`."""

    def __init__(self, *, ahead: bool = False) -> None:
        """ahead: a step may begin the pass of the next."""
        self._ahead = ahead
        self._scoring: Scoring | None = None  # begun by the step before
        self._rest_s = 0.0  # of the step before, after its rows were planned by: part of what a step costs

    def step(self, engine: Engine) -> None:
        """Plan, admit, propose, score, judge, commit."""
        scoring = self._scoring or self._begin(engine)
        self._scoring = None
        if scoring is None:
            return
        now, scored = scoring.round, scoring.wait()
        start = perf_counter()
        verdict = engine.judge(now, scored)
        num_open = engine.num_open
        engine.commit(now, scored, verdict)
        host_s = scoring.host_s + perf_counter() - start - now.commit_s
        engine.learn(now, verdict, StepTimes(now.draft_s, scored.target_s, host_s + self._rest_s))
        host_s = scoring.host_s + perf_counter() - start - now.commit_s
        # Whoever comes for the place of an answer that has ended is to come along in the next pass.
        if self._ahead and engine.target.beside and (engine.num_open == num_open or engine.scheduler.crowded):
            self._scoring = self._begin(engine)
        telling = perf_counter()
        engine.tell(now, verdict)
        told_s = perf_counter() - telling
        hidden_s = told_s if self._scoring else 0.0
        self._rest_s = told_s - hidden_s
        engine.count_step(now, now.draft_s + scored.target_s + host_s + self._rest_s, scored.target_s, hidden_s)

    def _begin(self, engine: Engine) -> Scoring | None:
        """Begin a pass over all rows; None if there are none."""
        start = perf_counter()
        plan = engine.plan()
        batch = engine.admit(plan)
        if not batch.rows:
            return None
        now = engine.propose(batch, plan)
        host_s = perf_counter() - start - now.draft_s
        scoring = engine.score(now)
        scoring.host_s = host_s
        return scoring

    def rest(self) -> bool:
        """Wait for the pass that was begun; the next step takes in what came of it."""
        if self._scoring is not None:
            self._scoring.wait()
        return self._scoring is not None

    def check(self, engine: Engine) -> None:
        """The rows of the pass that was begun are in flight, and no others."""
        flying = {r.row for r in self._scoring.round.batch.rows} if self._scoring else set()
        assert all(r.in_flight == (r.row in flying) for r in engine.scheduler.running)
