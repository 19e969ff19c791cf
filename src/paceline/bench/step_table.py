"""Measured tables of whole steps: real questions, a fixed K, all rows decoding.

The method is that of vLLM's Dynamic SD proposal: the median time of a step for each number of rows and of drafts,
and the share of drafts that are kept at each depth over a data set.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from paceline.bench.interleave import Question, SlicedRun
from paceline.control.cost import Curve, TableCost
from paceline.control.dynamic_table import measured_fields
from paceline.control.files import Profile
from paceline.control.fixed import FixedK
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.control.protocols import StepTimes
    from paceline.core.nouns import Batch, Draft, Verdict
    from paceline.engine.engine import Engine

    Progress = Callable[[int, int], None]  # (done, total)

STEPS, QUICK_STEPS = 40, 10  # steps timed at each number of rows and drafts
REQUESTS_A_ROW = 4  # most requests that are asked for these steps, per row
SLICE_S = 0.05  # time between two checks of how many steps were timed


@dataclass(frozen=True)
class WatchedK(FixedK):
    """A fixed K that records times of full steps and kept drafts."""

    num_rows: int = 1  # rows of a full step; all of them decode
    steps_s: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # drafts kept, for each row and step with room for k drafts

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> tuple[()]:
        """Record the step."""
        if len(batch.rows) == self.num_rows and all(r.decodes for r in batch.rows):
            self.steps_s.append(times.total_s)
        for row, drafted, kept in zip(batch.rows, draft.rows, verdict.rows, strict=True):
            if row.decodes and len(drafted) and row.max_drafts == self.k:
                self.kept.append(kept.num_accepted)
        return ()


def only_drafter(engine: Engine) -> str:
    """Return the name of an engine's only drafter. Raises `ConfigError`."""
    names = list(engine.drafting.drafters)
    if len(names) != 1:
        raise ConfigError(f"drafts of one drafter are measured, not of {names}; name it: --draft NAME")
    return names[0]


def acceptance(engine: Engine, questions: Sequence[Question], k: int, num_rows: int) -> tuple[float, ...]:
    """Return the share of drafts kept at each depth, over all questions. Raises `PacelineError`.

    k: drafts of a row, or fewer where the drafter makes fewer. num_rows: questions that are answered at once.
    """
    name = only_drafter(engine)
    k = min(k, engine.drafting.drafters[name].needs.max_k)
    watched = WatchedK(name, k, num_rows=num_rows)
    _answer(engine, watched, questions, None)
    kept = np.array(watched.kept)
    return tuple(float((kept > depth).mean()) for depth in range(k)) if kept.size else ()


def measure_table(
    engine: Engine,
    questions: Sequence[Question],
    sizes: Sequence[int],
    ks: Sequence[int],
    num_steps: int,
    progress: Progress,
) -> Profile:
    """Return the times of steps with these rows and drafts, and acceptance. Raises `PacelineError`.

    The engine's controller and what it learnt are lost.
    """
    name, cells = only_drafter(engine), [(rows, k) for rows in sizes for k in ks]
    if ks[-1] > (max_k := engine.drafting.drafters[name].needs.max_k):
        raise ConfigError(f"--ks {ks[-1]}: {name} makes at most {max_k} drafts")
    seconds: dict[tuple[int, int], float] = {}
    for done, (rows, k) in enumerate(cells):
        progress(done, len(cells) + 1)
        watched = WatchedK(name if k else None, k, num_rows=rows)
        _answer(engine, watched, _cycled(questions, REQUESTS_A_ROW * rows), num_steps)
        if not watched.steps_s:
            raise ConfigError(f"in no step {rows} rows decoded: raise --max-tokens, or lower --batch-sizes")
        seconds[rows, k] = median(watched.steps_s)
    curves = tuple(Curve.of(sizes, [seconds[rows, k] for rows in sizes]) for k in ks)
    accepted_at = acceptance(engine, questions, ks[-1], sizes[-1])
    progress(1, 1)
    cost = TableCost(np.array(ks, np.float64), curves)
    return Profile(cost, (name,), accepted_at, measured_fields(max(ks[-1], 1)))


def _cycled(questions: Sequence[Question], count: int) -> list[Question]:
    """Return `count` questions in turn, each a request of its own."""
    some = [questions[i % len(questions)] for i in range(count)]
    return [Question(q.prompt, replace(q.request, request_id=str(i))) for i, q in enumerate(some)]


def _answer(engine: Engine, watched: WatchedK, questions: Sequence[Question], num_steps: int | None) -> None:
    """Answer questions cold until `num_steps` full steps were timed; None: answer all."""
    engine.control_by(lambda: watched)
    engine.forget()
    run = SlicedRun(engine, questions, watched.num_rows)
    while not run.done and (num_steps is None or len(watched.steps_s) < num_steps):
        run.run_slice(SLICE_S)
    run.finish(watched.drafter or "plain decoding")
