"""The serial loop: the six verbs one after another, all rows together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.step import Verbs


class SerialLoop:
    """Drafts, then scores; see `Loop`."""

    def step(self, engine: Verbs) -> None:
        """Take all rows through the six verbs."""
        plan = engine.plan()
        batch = engine.admit(plan)
        if not batch.rows:
            return
        drafted = engine.propose(batch, plan)
        pending = engine.score(drafted)
        engine.flush()  # beside the pass: outcomes of the step before
        scored = pending.wait()
        verdict = engine.judge(drafted, scored)
        engine.commit(drafted, scored, verdict)

    def wait(self) -> bool:
        """Return False: a step ends with its pass."""
        return False

    def check(self, engine: Verbs) -> None:
        """Assert that no row is in flight between steps."""
        assert not any(r.in_flight for r in engine.scheduler.running)
