"""One step of the engine: the six verbs in their order, and what is handed from verb to verb.

`SerialLoop` takes all rows through the verbs together. `overlap.py` has the other loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, TypeVar

from paceline.core.nouns import noun

if TYPE_CHECKING:
    from paceline.backend.target import PendingScores
    from paceline.core.nouns import Batch, Draft, Plan, Scores, Verdict
    from paceline.engine.scheduler import Group, Scheduler


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


@dataclass(slots=True, eq=False)
class StepInput:
    """Rows that go through a step together: admitted and drafted for, to be scored."""

    group: Group
    batch: Batch
    proposed: Draft
    draft: Draft  # the part of `proposed` that is verified
    begun_s: float  # clock at which its planning began
    draft_s: float  # drafter time of this step, seconds
    idle_s: float = 0.0  # since `begun_s`, neither host, drafters nor target worked for these rows


@noun
class StepScores:
    """Scores of a step and how long they took."""

    scores: Scores
    target_s: float  # time of the pass
    overlapped_s: float = 0.0  # of `target_s`: host or drafters worked beside the pass


class PendingStep:
    """A pass of the target that has been launched. Until `wait` the caller works beside it, where it can be."""

    def __init__(self, pending: PendingScores, start_s: float, *, asynchronous: bool) -> None:
        """start_s: clock before the launch. asynchronous: the pass runs while the caller does something else."""
        self._pending = pending
        self._start_s = start_s
        self._launched_s = perf_counter()
        self._asynchronous = asynchronous

    def wait(self) -> StepScores:
        """Wait for the pass. Its time does not include the caller's work that it did not run beside."""
        beside_s = perf_counter() - self._launched_s
        scores = self._pending.wait()
        whole_s = perf_counter() - self._start_s
        if self._asynchronous:
            return StepScores(scores, whole_s, beside_s)
        return StepScores(scores, whole_s - beside_s)


class Verbs(Protocol):
    """The six verbs of a step, in their order. `Engine` implements them."""

    scheduler: Scheduler

    def plan(self, group: Group = None) -> Plan:
        """Decide how far each row of a group may draft."""
        ...

    def admit(self, plan: Plan, group: Group = None) -> Batch:
        """Choose the rows of a group that run now."""
        ...

    def propose(self, batch: Batch, plan: Plan, group: Group = None) -> StepInput:
        """Draft for a batch."""
        ...

    def score(self, drafted: StepInput) -> PendingStep:
        """Launch the target's pass."""
        ...

    def judge(self, drafted: StepInput, scored: StepScores) -> Verdict:
        """Decide which drafts are kept."""
        ...

    def commit(self, drafted: StepInput, scored: StepScores, verdict: Verdict) -> None:
        """Take in what was kept."""
        ...

    def flush(self) -> None:
        """Make outcomes of the last commit. It is no verb, but work to do beside a pass."""
        ...


EngineT = TypeVar("EngineT", contravariant=True)


class Loop(Protocol[EngineT]):
    """The order in which an engine's verbs run, and the rows they run on."""

    def step(self, engine: EngineT) -> None:
        """Take one step: at most one pass of the target."""
        ...

    def wait(self) -> bool:
        """Wait, between steps, for the pass in flight; return False if there is none."""
        ...

    def check(self, engine: EngineT) -> None:
        """Assert, between steps, what the loop promises."""
        ...
