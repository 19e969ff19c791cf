"""Prices of an engine's passes, alone and beside another: a worker of `sim_against_runs`.

    python -m tools.measure.step_prices CORE [FLAG ...]

It loads an engine with the flags of `paceline serve`, on one core. For each line `SECONDS` on its input it takes
steps for that long, and writes their passes as one line of JSON. Rows are added one by one, up to the limit, so
that prompts of many lengths are computed beside any number of rows, behind a shared beginning or without one. Some
episodes have short prompts only and some long ones, which tells the price of a key from that of a token.
Drafts are off. Times are of the processor: what another process takes of the core is not the engine's.

A start's own calibration takes 2.5 s and no step with a long prompt, so the prices of a prompt token and of a key
differ by a fifth and more from one start to the next. With drafts that hardly matters; for a simulator it does.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.cost import DraftCost, MeasuredCost, TimedPass, fit_target
from paceline.control.files import Profile, step_cost
from paceline.control.policy import Work
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.params import SamplingParams, Speculation
from paceline.core.request_nouns import Request
from paceline.core.system import stay_on
from paceline.engine.assembly.build import build
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.engine.step_view import step_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.control.online_cost import OnlineCost
    from paceline.engine.engine import Engine

MOST_ROWS = 16
DECODE_STEPS = 5  # after each prompt
SHORT, LONG = (8, 16, 24, 32, 48, 64), (96, 128, 192, 256, 348)  # tokens of prompts behind their beginning
BEGINNING = 160  # tokens that prompts of an episode share, if they share some
NUM_BEGINNINGS = 4  # of an episode's prompts, in turns: with one, a cache would keep the keys that all rows read
EPISODES = ((0, SHORT), (BEGINNING, LONG), (BEGINNING, SHORT), (0, LONG))  # in turns
POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)  # of the curve of token rows
FILLING = 1500  # tokens of a prompt that fills memory
OUTLIER = 1.3  # a step that takes so much longer than its price was interrupted
WORKER = (sys.executable, "-m", "tools.measure.step_prices")


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's pass, or the median of several alike."""

    work: Work
    rows: int  # that decoded
    target_s: float


# The worker ---------------------------------------------------------------------------------------


class Stepper:
    """Takes steps of an engine."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self._engine = engine
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self._params = SamplingParams(temperature=0.0, max_tokens=8 * MOST_ROWS * DECODE_STEPS, ignore_eos=True)
        self._num_added = 0
        self._kinds = cycle(EPISODES)

    def fill(self) -> None:
        """Use all memory for keys and values once.

        Its first use takes time that no later pass does.
        """
        engine = self._engine
        for number in range(engine.scheduler.pool.num_pages * PAGE_TOKENS // FILLING + 1):
            prompt, params = self._tokens(FILLING), replace(self._params, max_tokens=1)
            engine.add(Request(f"fills-{number}", prompt, params, seed=0, speculation=Speculation(draft="off")))
            while engine.has_work:
                engine.step()

    def run(self, seconds: float) -> list[StepTime]:
        """Take steps for so long, and those of one row at least."""
        end_s, found = perf_counter() + seconds, list[StepTime]()
        while not found or perf_counter() < end_s:
            found += self.episode(end_s, *next(self._kinds))
        return found

    def episode(self, end_s: float, num_shared: int, lengths: Sequence[int]) -> list[StepTime]:
        """Add rows one by one, and return the steps.

        num_shared: tokens of a beginning, of which there are `NUM_BEGINNINGS`. lengths: of what may follow it.
        """
        beginnings, found = [self._tokens(num_shared) for _ in range(NUM_BEGINNINGS)], []
        for row in range(min(MOST_ROWS, self._engine.scheduler.limits.num_rows)):
            behind = self._tokens(self._chance.choice(lengths))
            found.append(self._add((*beginnings[row % NUM_BEGINNINGS], *behind)))
            found += [self._step() for _ in range(DECODE_STEPS)]
            if perf_counter() > end_s:
                break
        for request_id in [r.request.request_id for r in self._engine.scheduler.requests.values()]:
            self._engine.cancel(request_id)
        while self._engine.has_work:
            self._engine.step()
        return found

    def _tokens(self, count: int) -> tuple[int, ...]:
        size = self._engine.target.config.vocab_size
        return tuple(self._chance.randrange(size) for _ in range(count))

    def _add(self, prompt: tuple[int, ...]) -> StepTime:
        """Compute a prompt beside the rows that decode, in one step."""
        name, self._num_added = f"priced-{self._num_added}", self._num_added + 1
        self._engine.add(Request(name, prompt, self._params, seed=0, speculation=Speculation(draft="off")))
        return self._step(len(prompt))

    def _step(self, prompt: int = 0) -> StepTime:
        """Take a step. prompt: tokens of the one that is computed in it."""
        engine, before = self._engine, self._engine.stats()
        view = step_view(engine.scheduler, engine.drafting)
        start_s, used_s = perf_counter(), process_time()
        engine.step()
        share = (process_time() - used_s) / (perf_counter() - start_s)
        gained, keys = engine.stats().since(before), int(view.lengths.sum())
        work = Work(len(view.rows), 0, keys, keys)
        if prompt:
            cached = int(gained.cached_tokens)
            chunk = prompt - cached
            work += Work(chunk, chunk - 1, prompt, chunk * cached + chunk * (chunk + 1) // 2)
        return StepTime(work, len(view.rows), share * gained.target_s)


def work_on(core: int, flags: Sequence[str]) -> None:
    """Load an engine and measure whenever a line asks for it."""
    stay_on(frozenset({core}))
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    stepper = Stepper(build(engine_config(parser.parse_args(flags))).engine)
    stepper.fill()
    stepper.run(0.5)  # warm
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        found = stepper.run(float(line))
        sys.stdout.write(json.dumps([(s.work.as_ints, s.rows, s.target_s) for s in found]) + "\n")
        sys.stdout.flush()


# Those who ask it ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prices:
    """Prices of passes, fitted to measured ones."""

    profile: Profile
    error: float  # median error of a pass, as a share

    @classmethod
    def of(cls, steps: Sequence[StepTime]) -> Prices:
        """Fit prices. Passes that were interrupted are left out of a second fit."""
        found = cls._fit(steps)
        kept = [s for s in steps if s.target_s < OUTLIER * float(found.profile.cost.target(s.work))]  # type: ignore[union-attr]
        return cls._fit(kept)

    @classmethod
    def _fit(cls, steps: Sequence[StepTime]) -> Prices:
        most = max(int(s.work.tokens) for s in steps)
        points = [p for p in POINTS if p <= most]
        target = fit_target([TimedPass(s.work, s.target_s) for s in steps], points=points)
        error = median(abs(float(target(s.work)) / s.target_s - 1) for s in steps)
        return cls(Profile(MeasuredCost(target, (DraftCost(()),))), error)

    def cost(self) -> OnlineCost:
        """Return the prices of steps without their host's part."""
        return step_cost(self.profile)  # type: ignore[return-value]

    def pass_s(self, rows: int, length: int) -> float:
        """Return the seconds of a pass in which so many rows of some length decode."""
        keys, none = rows * length, np.zeros(rows, np.int64)
        return self.cost().price(Work(rows, 0, keys, keys), np.full(rows, length), none, none)


class Workers:
    """Engines on cores of their own, ready to be measured."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def measure(self, count: int, seconds: float) -> list[StepTime]:
        """Return the steps of the first engines, taken at once."""
        for process in self._processes[:count]:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        return [step for process in self._processes[:count] for step in _steps_of(_line(process))]


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if line := process.stdout.readline():
        return line
    raise RuntimeError("a worker has ended")


def _steps_of(line: str) -> Iterator[StepTime]:
    for work, rows, target_s in json.loads(line):
        yield StepTime(Work(*work), rows, target_s)


@contextmanager
def workers(cores: Sequence[int], flags: Sequence[str]) -> Iterator[Workers]:
    """Start an engine on each core, in turn; they end with the block."""
    with ExitStack() as stack:
        processes = []
        for core in cores:
            command = [*WORKER, str(core), *flags]
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))  # noqa: S603
            stack.callback(process.kill)
            while _line(process) != "ready\n":
                pass
            processes.append(process)
        yield Workers(processes)


if __name__ == "__main__":
    work_on(int(sys.argv[1]), sys.argv[2:])
