"""The serial loop: the six verbs one after another, all rows together."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from paceline.control.controller import StepTimes

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


class SerialLoop:
    """Drafts, then scores; see `Loop`."""

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
        host_s = perf_counter() - start - now.draft_s - scored.target_s
        engine.learn(now, verdict, StepTimes(now.draft_s, scored.target_s, host_s))
        engine.count_step(now, perf_counter() - start, scored.target_s, scored.hidden_s)

    def rest(self) -> bool:
        """Do nothing: a step ends with its pass."""
        return False

    def check(self, engine: Engine) -> None:
        """Between steps no row is in flight."""
        assert not any(r.in_flight for r in engine.scheduler.running)
