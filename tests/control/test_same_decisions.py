"""The controller's choices over thousands of steps, held to digests: a change of form changes no choice.

Exponentials differ in their last bit between processors, and so may the choice between two that are as good. The
digests hold where `exp` gives the bits that it gave where they were taken; elsewhere these tests are skipped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from math import exp, nan
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.control.costs import H100

from paceline.control.files import conditional, from_json, make_loop, read_profile
from paceline.control.goodput import Goodput
from paceline.control.policy import StepView, Work
from paceline.control.protocols import StepTimes
from paceline.control.row_by_row import Objective
from paceline.core.nouns import NO_DRAFT, Batch, BatchRow, Draft, RowDraft, RowVerdict, Verdict
from paceline.sim.simulator import SimulatedReplica, Simulator, Workload, mixed_ease

if TYPE_CHECKING:
    from paceline.control.controller import ClosedLoop
    from paceline.control.policy import Decision
    from paceline.core.nouns import Plan

DEPTH, NAMES = 8, ("suffix", "eagle3", "draft-model")


def profile(steep: float) -> dict[str, Any]:
    """A lookup drafter, a head that honours stops and a draft model, as JSON."""
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 512]
    seconds = [(5e-3 + 4e-5 * steep * n) for n in counts]
    head, model = (
        [{"counts": [1, 8, 64], "seconds": [a * d, 1.5 * a * d, 6 * a * d], "stepped": False} for d in range(1, 9)]
        for a in (1.5e-4, 6e-4)
    )
    return {
        "format": "paceline profile 1",
        "about": {"host_s": 2e-4},
        "target": {"counts": counts, "seconds": seconds, "stepped": steep > 3, "unscored_s": 1e-5}
        | {"kv_token_s": 2e-8, "pair_s": 1e-8},
        "drafters": {"suffix": [], "eagle3": head, "draft-model": model},
        "accepted_at": [],
        "trained_to": [[], [0.7, 0.5, 0.35, 0.25], []],
        "minding": [1],
    }


@dataclass
class Engine:
    """Rows that come and go; acceptance is drawn, and the machine drifts."""

    loop: ClosedLoop
    seed: int
    most_rows: int
    requests: bool = False
    groups: int = 1
    lines: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.lengths = self.rng.integers(20, 300, 64)
        self.left = np.zeros(64, np.int64)
        self.chance = self.rng.uniform(0.2, 0.95, (64, 3))
        self.drift = 0.0

    def run(self, steps: int) -> str:
        for step in range(steps):
            self.drift = 0.97 * self.drift + float(self.rng.normal(0, 0.02))
            size = 1 + int((self.most_rows - 1) * (0.5 + 0.5 * np.sin(step / 97)))
            for group in range(self.groups):
                rows = np.arange(size) * self.groups + group
                for row in rows[self.left[rows] <= 0].tolist():
                    self.left[row] = int(self.rng.integers(10, 200))
                    self.lengths[row] = int(self.rng.integers(20, 300))
                    self.chance[row] = self.rng.uniform(0.2, 0.95, 3)
                    self.loop.admit(row)
                self._step(rows[self.left[rows] > 0], group, step)
        return hashlib.sha256(repr(self.lines).encode()).hexdigest()[:16]

    def _step(self, rows: np.ndarray, group: int, step: int) -> None:
        loop = self.loop.second_group if group else self.loop
        special = self.requests and step % 11 == 0
        prefill = int(self.rng.integers(16, 200)) if self.rng.random() < 0.08 else 0
        if not special and self.groups == 1 and not prefill and loop.reuse_plan(len(rows)):
            self.lines.append("reused")
            self._end(loop, rows, Draft((NO_DRAFT,) * len(rows)), 0)
            return
        view = self._view(loop, rows, prefill, special, step)
        plan = loop.plan(view)
        d = loop.decision
        assert d is not None
        stops = {r: (s.sureness, s.least[0]) for r, s in sorted(d.stops.items())}
        self.lines.append((d.ks.tolist(), d.drafters.tolist(), d.prefill_tokens, plan.given_up))
        self.lines.append((d.seconds, d.tokens, d.speedup, stops))
        self._end(loop, rows, self._drafted(rows, plan, view), prefill)

    def _view(self, loop: ClosedLoop, rows: np.ndarray, prefill: int, special: bool, step: int) -> StepView:
        n = len(rows)
        previews = {}
        unavailable = frozenset({1}) if step % 400 > 380 else frozenset()
        if loop.wants_preview(n, unavailable) or special:
            ends = self.rng.integers(0, 6, n) * (self.rng.random(n) < 0.4) * (step // 200 % 2)
            previews = {0: np.where(np.arange(ends.max(initial=0)) < ends[:, None], self.chance[rows, :1], np.nan)}
        requested = {int(rows[0]): int(self.rng.integers(0, 3))} if special and self.rng.random() < 0.5 else {}
        tpot_s = {int(rows[-1]): 0.008} if special and self.rng.random() < 0.5 else {}
        done = Work(prefill, max(prefill - 1, 0), prefill, prefill * (prefill + 1) // 2)
        return StepView(
            rows, self.lengths[rows], self.left[rows], done, previews, requested, 0, tpot_s, unavailable
        )

    def _drafted(self, rows: np.ndarray, plan: Plan, view: StepView) -> Draft:
        made = []
        for row in rows.tolist():
            planned = plan.rows.get(row)
            if planned is None or planned.drafter is None:
                made.append(NO_DRAFT)
                continue
            margins = self.rng.uniform(0, 4, planned.k)
            k = planned.k
            if planned.stop is not None:
                k = next((j for j in range(1, k) if planned.stop.over(margins[:j].tolist())), k)
            says = planned.drafter != "draft-model"
            sure = (1 / (1 + np.exp(-margins[:k]))).tolist() if says else [nan] * k
            made.append(RowDraft([7] * k, planned.drafter, sure))
        return Draft(tuple(made))

    def _end(self, loop: ClosedLoop, rows: np.ndarray, proposed: Draft, prefill: int) -> None:
        batch = [BatchRow(int(r), str(r), 1, 8, True, int(self.lengths[r]) + 9, decodes=True) for r in rows]
        drafts, verdicts = list(proposed.rows), []
        if prefill:
            batch.append(BatchRow(63, "p", prefill, 0, False, prefill + 9, chunk_end=prefill + 9))
            drafts.append(NO_DRAFT)
        proposed, found = Draft(tuple(drafts)), Batch(0, tuple(batch))
        verified = loop.trim(found, proposed)
        tokens = 0
        for r, d in zip(batch, verified.rows, strict=True):
            if not r.decodes:
                verdicts.append(RowVerdict())
                continue
            chance = self.chance[r.row, NAMES.index(d.drafter)] if d.drafter else 0.0
            kept = int((self.rng.random(len(d)) < chance).cumprod().sum())
            verdicts.append(RowVerdict([7] * (kept + 1), kept))
            self.left[r.row] -= kept + 1
            self.lengths[r.row] += kept + 1
            tokens += 1 + len(d)
        self.lines.append([len(d) for d in verified.rows])
        slow = exp(self.drift)
        draft_s = 2e-4 * sum(len(d) for d in proposed.rows if d.drafter != "suffix") * slow
        times = StepTimes(draft_s, (4e-3 + 9e-5 * (tokens + prefill)) * slow, 2e-4 + 1e-5 * len(rows))
        for r in loop.observe(found, proposed, verified, Verdict(tuple(verdicts)), times):
            self.lines.append((r.measured_s, r.predicted_s, r.plain_s))


@dataclass
class Recorder:
    """A policy in the simulator whose decisions are written down."""

    policy: Goodput
    lines: list[Any] = field(default_factory=list)

    def decide(self, view: StepView) -> Decision:
        d = self.policy.decide(view)
        self.lines.append((d.ks.tolist(), d.drafters.tolist(), d.seconds, d.tokens, d.speedup, d.prefill_tokens))
        return d

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def exp_digest() -> str:
    """What `exp` and `log` say here, numpy's and the C library's."""
    x = np.linspace(-7, 7, 4001)
    numbers = [
        np.exp(x).tobytes(),
        np.log(np.abs(x) + 1e-3).tobytes(),
        repr([exp(v) for v in x.tolist()]).encode(),
    ]
    return hashlib.sha256(b"".join(numbers)).hexdigest()[:16]


EXP = "0c7330f5c97c32a1"
ENGINES = {
    "few rows": ((1.0, 3), {}, "286d4b9cb221780e"),
    "a lone row": ((1.0, 1), {}, "79f8bdfb4e96f9d6"),
    "many rows, dear": ((6.0, 40), {}, "ff4ee8ee34585221"),
    "many rows, cheap": ((0.5, 20), {}, "64b942b6714640a8"),
    "requests that ask": ((1.0, 14), {"requests": True}, "acd40e5bd37413ad"),
    "two groups": ((1.0, 9), {"groups": 2}, "08193b04389f1829"),
    "latency": ((1.0, 9), {"objective": "latency:6"}, "22181caeb2d89c86"),
}
TABLES = {1: "f1dce5e78e33cfdb", 4: "10d060fc7c530369", 16: "0e19d6523fff5751", 64: "3696de04ee0751de"}


@pytest.fixture(autouse=True)
def _same_arithmetic() -> None:
    if exp_digest() != EXP:
        pytest.skip("exp differs in the last bit from that of the machine where the digests were taken")


def choices_of(number: int, steep: float, most_rows: int, more: dict[str, Any]) -> str:
    objective = Objective.parse(more.pop("objective", "throughput"))
    loop = make_loop(from_json(profile(steep)), NAMES, 64, [DEPTH] * 3, None, objective)
    return Engine(loop, number, most_rows, **more).run(1500)


@pytest.mark.parametrize("name", ENGINES)
def test_the_same_is_chosen_for_an_engine(name: str) -> None:
    (steep, most_rows), more, expected = ENGINES[name]
    assert choices_of(list(ENGINES).index(name), steep, most_rows, dict(more)) == expected


def choices_by_table(rows: int) -> str:
    table = read_profile(H100)
    chances = conditional(table.accepted_at)
    n = 4 * rows + 8
    ease = np.random.default_rng(rows).normal(0, 1.0, n)
    load = Workload(np.zeros(n), np.full(n, 300), np.full(n, 256), mixed_ease(chances, ease))
    policy = Recorder(Goodput(table.cost, rows, (5,), (chances,)))
    Simulator(load, SimulatedReplica(rows, 512), table.cost, policy).run()
    return hashlib.sha256(repr(policy.lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("rows", TABLES)
def test_the_same_is_chosen_by_a_table(rows: int) -> None:
    assert choices_by_table(rows) == TABLES[rows]
