"""The serial loop: the six verbs one after another, all rows together."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from paceline.control.controller import StepTimes

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


class SerialLoop:
    """Drafts, then scores; see `Loop`."""

    def __init__(self) -> None:
        self._learning_s = 0.0  # of the last step: part of what a step costs

    def step(self, engine: Engine) -> None:
        """Plan, admit, propose, score, judge, commit."""
        start = perf_counter()
        plan = engine.plan()
        batch = engine.admit(plan)
        if not batch.rows:
            return
        now = engine.propose(batch, plan)
        scored = engine.score(now)
        verdict = engine.judge(now, scored)
        engine.commit(now, scored, verdict)
        committed = perf_counter()
        host_s = committed - start - now.draft_s - scored.target_s + self._learning_s
        engine.learn(now, verdict, StepTimes(now.draft_s, scored.target_s, host_s))
        end = perf_counter()
        self._learning_s = end - committed
        engine.count_step(now, end - start, scored.target_s)

    def rest(self) -> None:
        """Nothing does."""

    def check(self, engine: Engine) -> None:
        """Nothing is in flight between steps."""
        assert not any(r.in_flight for r in engine.scheduler.running)
