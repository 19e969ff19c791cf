"""A day's load: requests in flight rise and fall, and tasks change.

Policies alternate in slices of a second, so a slow hour of the machine slows every policy. A calibration loop
before and after each slice finds the rounds in which the machine stalled.

Phases are compared by output tokens per second. Windows of some seconds are too short for that: prompts are read
in bursts, and a policy that reads a second earlier has its output tokens in another window. So in windows prompt
tokens count too, each at the price that it has for plain decoding in that phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.bench.interleave import SLICE_S, SlicedRun
from paceline.bench.report import PLAIN
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.bench.prompt_file import Prompt
    from paceline.bench.scenarios.engine_pool import EnginePool
    from paceline.bench.scenarios.result_file import ResultFile
    from paceline.core.params import SamplingParams

    Json = dict[str, Any]
    OnProgress = Callable[[int, int], None]  # (done, total)

TASKS: Mapping[str, tuple[str, ...]] = {  # categories of prompts, by task
    "code": ("code_edit", "coding"),
    "chat": ("writing", "roleplay", "reasoning", "stem", "humanities", "extraction", "qa"),
    "summarisation": ("summarization",),
}
PHASES = "chat:1,code:4,summarisation:16,chat:64,code:64,summarisation:16,chat:4,code:1"
MAX_IN_FLIGHT = 1024
WINDOW_S = 5.0
STALL_RATIO = 1.5  # the machine stalls if the calibration loop takes this many times its median
LOOP_ROUNDS = 100_000  # of the calibration loop


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """A task and its number of requests in flight."""

    task: str
    in_flight: int


def parse_phases(text: str) -> tuple[LoadPhase, ...]:
    """Parse `TASK:IN_FLIGHT[,...]`; a task is one of `TASKS` or a category. Raises `ConfigError`."""
    found = []
    for part in text.split(","):
        task, _, number = part.partition(":")
        if not task or not number.isdigit() or not 1 <= int(number) <= MAX_IN_FLIGHT:
            raise ConfigError(f"--phases {part!r}: write TASK:IN_FLIGHT, such as chat:16")
        found.append(LoadPhase(task, int(number)))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class VaryingLoad:
    """Runs all policies through the phases of a day."""

    pool: EnginePool
    results: ResultFile
    prompts: Sequence[Prompt]
    params: SamplingParams
    policies: tuple[str, ...]  # plain decoding first, `auto` last
    phases: tuple[LoadPhase, ...]
    rounds: int = 2  # questions per request in flight
    min_questions: int = 4  # of a phase

    def run(self, on_progress: OnProgress) -> None:
        """Run every phase that is not recorded yet."""
        for index, phase in enumerate(self.phases):
            key = {"phase": index, "task": phase.task, "in_flight": phase.in_flight}
            self.results.once(key, partial(self._run_phase, phase))
            on_progress(index + 1, len(self.phases))

    def _run_phase(self, phase: LoadPhase) -> Json:
        own = [p for p in self.prompts if p.category in TASKS.get(phase.task, (phase.task,))]
        if not own:
            raise ConfigError(f"no prompt is of the task {phase.task!r}")
        questions = self.pool.choose(own, max(self.min_questions, self.rounds * phase.in_flight), self.params)
        runs = {name: SlicedRun(self.pool.engine(name), questions, phase.in_flight) for name in self.policies}
        rounds: list[Json] = []
        while not all(run.done for run in runs.values()):
            rounds.append(_run_round(runs))
        for name, run in runs.items():
            run.finish(name)
        return {"rounds": rounds}

    # Results -------------------------------------------------------------------------------------

    def table(self) -> list[Json]:
        """Return a row for each phase: tokens per second of each policy."""
        return [
            {"phase": f"{r['task']} x{r['in_flight']}"}
            | {name: _rate(r["rounds"], name) for name in self.policies}
            for r in self.results.runs
        ]

    def verdict(self) -> Json:
        """Return figures of each policy over all phases, and the windows of `auto`.

        For each policy: the geometric mean and the worst of its ratios to plain decoding over phases, and its mean
        divided by that of the fixed policy with the best mean over the whole day.
        """
        table = self.table()
        found: Json = {}
        for name in self.policies:
            ratios = [row[name] / row[PLAIN] for row in table]
            found[name] = {"mean": geometric_mean(ratios), "worst_phase": min(ratios)}
        fixed = self.policies[1:-1] or self.policies[:1]
        best = max(found[name]["mean"] for name in fixed)
        for figures in found.values():
            figures["to_best"] = figures["mean"] / best
        steady, stalled = windows([r["rounds"] for r in self.results.runs], self.policies[-1], PLAIN)
        return found | {"windows": steady, "windows_left_out": stalled}


def _run_round(runs: Mapping[str, SlicedRun]) -> Json:
    """Give every run a slice; return its seconds, output tokens and prompt tokens.

    `full` lists the runs that had all their requests in flight. `machine_s` is the longest calibration loop.
    """
    loops, slices, full = [calibration_loop_s()], {}, []
    for name, run in runs.items():
        if not run.done:
            prefilled = run.prefilled_tokens
            slices[name] = [*run.run_slice(), run.prefilled_tokens - prefilled]
            loops.append(calibration_loop_s())
            full += [name] * run.full
    return {"machine_s": max(loops), "full": full, **slices}


def windows(phases: Sequence[Sequence[Json]], name: str, base: str) -> tuple[list[float], list[float]]:
    """Return ratios of work per second of two policies, in windows of some seconds.

    The first list is of steady windows, the second of those with a stall. Only rounds count in which both have all
    their requests in flight: the faster policy is the first to run out of requests.
    """
    usual_s = median(round_["machine_s"] for rounds in phases for round_ in rounds)
    steady: list[float] = []
    stalled: list[float] = []
    for rounds in phases:
        both = [r for r in rounds if {name, base} <= set(r["full"])]
        prices = _prices(both, base)
        size = max(1, round(WINDOW_S / SLICE_S))
        for start in range(0, len(both) - size + 1, size):
            window = both[start : start + size]
            has_stall = max(r["machine_s"] for r in window) > STALL_RATIO * usual_s
            own, plain = (_work_per_s(window, policy, prices) for policy in (name, base))
            (stalled if has_stall else steady).append(own / max(plain, 1e-9))
    return steady, stalled


def _prices(rounds: Sequence[Json], name: str) -> NDArray[float64]:
    """Return the seconds of an output token and of a prompt token. [2]"""
    seconds, *tokens = np.array([r[name] for r in rounds], float).reshape(-1, 3).T
    prices: NDArray[float64] = np.linalg.lstsq(np.stack(tokens, axis=1), seconds)[0]
    return prices.clip(0)


def _work_per_s(rounds: Sequence[Json], name: str, prices: NDArray[float64]) -> float:
    """Return a policy's tokens at their prices per second."""
    seconds, *tokens = np.sum([r[name] for r in rounds], axis=0)
    return float(prices @ tokens / max(seconds, 1e-9))


def _rate(rounds: Sequence[Json], name: str) -> float:
    """Return a policy's output tokens per second."""
    own = [r[name] for r in rounds if name in r]
    return float(sum(tokens for _, tokens, _ in own) / max(sum(seconds for seconds, *_ in own), 1e-9))


def calibration_loop_s() -> float:
    """Return the seconds of a loop that always does the same work."""
    start_s = perf_counter()
    for _ in range(LOOP_ROUNDS):
        pass
    return perf_counter() - start_s
