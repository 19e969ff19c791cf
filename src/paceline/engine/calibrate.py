"""What does a step cost here? Measured on the engine itself, with requests that nobody reads.

Rows are filled one after another, and at each number of rows a few steps are timed with no drafts, with drafts
that cost nothing and are of no use (what verification costs), and with each real drafter (what drafting costs).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.control.cost import DraftCost, MeasuredCost, Work
from paceline.control.fit import TimedPass, fit_drafting, fit_target
from paceline.control.fixed import FixedK
from paceline.core.nouns import NO_DRAFT, Draft, Request, RowDraft
from paceline.core.params import SamplingParams
from paceline.draft.drafter import Needs
from paceline.engine.drafting import Drafting
from paceline.engine.serial import SerialLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.core.nouns import Batch, Plan, Scores, Verdict
    from paceline.engine.engine import Engine

    Progress = Callable[[str, int, int], None]  # (what, done, total)

PROMPT_LEN, LONG_PROMPT_LEN = 24, 1024
WARM_UP = 1  # steps before those that are timed


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured, and how often."""

    num_rows: tuple[int, ...] = (1, 4, 16, 64)
    ks: tuple[int, ...] = (0, 1, 2, 3, 5, 8)
    drafter_ks: tuple[int, ...] = (1, 4, 8)
    most_tokens: int = 256  # of a pass
    repeats: int = 3
    seconds: float = 3.0  # after these, only what cannot be left out, and once


QUICK = Grid()
THOROUGH = Grid((1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 3, 4, 5, 6, 8), (1, 2, 3, 4, 6, 8), 1024, 9, 120.0)


class Always:
    """A drafter that always proposes what was planned, of no use: it makes passes with drafts happen."""

    name = "always"
    needs = Needs()

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Nothing to remember."""

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Propose token 0, as often as planned."""
        del plan
        return Draft(
            tuple(RowDraft((0,) * r.max_drafts, self.name) if r.max_drafts else NO_DRAFT for r in batch.rows)
        )

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Nothing to trim."""

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """It keeps no store."""
        del row
        return {}

    def release(self, row: int) -> None:
        """Nothing to forget."""

    def forget(self) -> None:
        """Nothing to forget."""

    def report(self) -> Mapping[str, Any]:
        """Say what it is."""
        return {"drafter": self.name}


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured: prices, and the host's share of a step."""

    cost: MeasuredCost
    names: tuple[str, ...]  # of the drafters, in the order of `cost.drafters`
    host_s: float
    passes: tuple[TimedPass, ...]


def calibrate(engine: Engine, grid: Grid = QUICK, progress: Progress | None = None) -> Calibration:
    """Time steps of an idle engine. Counters and caches are afterwards as if nothing had happened."""
    kept = engine.drafting, engine.controller, engine.loop
    engine.loop = SerialLoop()
    calibrator = _Calibrator(engine, grid, progress)
    try:
        calibrator.run()
    finally:
        calibrator.clear()
        engine.drafting, engine.controller, engine.loop = kept
        engine.forget()
        engine.reset_stats()
    return calibrator.result()


class _Calibrator:
    def __init__(self, engine: Engine, grid: Grid, progress: Progress | None) -> None:
        self.engine, self.grid, self.progress = engine, grid, progress
        self.end = perf_counter() + grid.seconds
        self.drafters = dict(engine.drafting.drafters)
        self.passes: list[TimedPass] = []
        self.drafting: dict[str, dict[tuple[int, int], float]] = {name: {} for name in self.drafters}
        self.hosts: list[float] = []
        self._num_added = 0

    def run(self) -> None:
        e = self.engine
        vocab_size = e.target.config.vocab_size
        always = Always()
        e.drafting = Drafting([*self.drafters.values(), always], vocab_size)
        most = e.scheduler.limits.num_rows
        sizes = [n for n in self.grid.num_rows if n <= most] or [most]
        for done, num_rows in enumerate(sizes):
            if self.progress:
                self.progress("measuring what steps cost", done, len(sizes))
            self._fill(num_rows, PROMPT_LEN)
            self._measure(num_rows)
        self.clear()
        self._fill(1, min(LONG_PROMPT_LEN, e.scheduler.limits.max_len // 2))
        for k in (0, self.grid.ks[-1]):
            self._time_passes(k)

    def _measure(self, num_rows: int) -> None:
        ks = [k for k in self.grid.ks if num_rows * (1 + k) <= self.grid.most_tokens]
        for k in ks:
            if self._in_time(num_rows) or k in (ks[0], ks[-1]):
                self._time_passes(k)
        for name, drafter in self.drafters.items():
            for k in self.grid.drafter_ks:
                if k <= drafter.needs.max_k:
                    self.drafting[name][num_rows, k] = self._time_drafter(name, k)

    def _in_time(self, num_rows: int) -> bool:
        """Whether there is time for what can be left out."""
        return num_rows == 1 or perf_counter() < self.end

    def _repeats(self) -> int:
        return self.grid.repeats if perf_counter() < self.end else 1

    def _time_passes(self, k: int) -> None:
        self.engine.controller = FixedK(Always.name, k) if k else FixedK()
        steps = [self._step() for _ in range(self._repeats() + WARM_UP)][WARM_UP:]
        self.passes.append(TimedPass(self._work(k), median(target_s for target_s, _, _ in steps)))
        self.hosts.append(median(host_s for _, _, host_s in steps))

    def _time_drafter(self, name: str, k: int) -> float:
        self.engine.controller = FixedK(name, k)
        return median([self._step()[1] for _ in range(self._repeats() + WARM_UP)][WARM_UP:])

    def _step(self) -> tuple[float, float, float]:
        """Run a step and return the seconds of the pass, of drafting and of the host."""
        before = self.engine.stats()
        self.engine.step()
        gained = self.engine.stats().since(before)
        return gained.target_s, gained.draft_s, gained.host_s

    def _work(self, k: int) -> Work:
        lengths = [r.upper_len for r in self.engine.scheduler.decoding()]
        keys = sum(lengths)
        return Work(len(lengths) * (1 + k), 0, keys, sum((1 + k) * n for n in lengths))

    def _fill(self, num_rows: int, prompt_len: int) -> None:
        """Add requests until so many rows decode; their prefill is timed too."""
        e, size = self.engine, self.engine.target.config.vocab_size
        e.controller = FixedK()
        most = min(e.scheduler.limits.max_len, e.scheduler.capacity)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=most - prompt_len)
        while self._num_open() < num_rows:
            ids = tuple((self._num_added * 7919 + i * 104729) % size for i in range(prompt_len))
            e.add(Request(f"calibration-{self._num_added}", ids, params, seed=0))
            self._num_added += 1
        while len(e.scheduler.decoding()) < num_rows:
            self._step()

    def _num_open(self) -> int:
        return len(self.engine.scheduler.running) + len(self.engine.scheduler.waiting)

    def clear(self) -> None:
        for request_id in [r.request.request_id for r in self.engine.scheduler.by_id.values()]:
            self.engine.cancel(request_id)
        while self.engine.has_work:
            self.engine.step()

    def result(self) -> Calibration:
        costs = tuple(fit_drafting(timed) if timed else DraftCost(()) for timed in self.drafting.values())
        cost = MeasuredCost(fit_target(self.passes), costs)
        return Calibration(cost, tuple(self.drafting), median(self.hosts), tuple(self.passes))
