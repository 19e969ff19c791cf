"""Traces of control, and their replay.

A trace has a run of the controller as JSON lines: first the profile, then the view and the outcome of each step.
Everything that a policy does follows from these, so a replay makes the same choices. Keys on disk keep the names
that version 1 gave them.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.control.controller import ClosedLoop
from paceline.control.files import from_json, make_loop, to_json
from paceline.control.goodput import Goodput
from paceline.control.learnt import KeptLearning
from paceline.control.overlap import planned_overlap
from paceline.control.plan_reuse import MANY_ROWS
from paceline.control.policy import Decision, Drafted, Outcomes, StepView, Work
from paceline.control.row_by_row import THROUGHPUT, Objective, alive_once_drafted
from paceline.core.errors import ConfigError
from paceline.core.nouns import noun
from paceline.core.system import file_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.files import Profile
    from paceline.control.overlap import OverlapCost


log = logging.getLogger(__name__)
TRACE_FORMAT = "paceline trace 1"


@noun
class TracedEngine:
    """Settings of the engine whose choices are traced."""

    objective: str = THROUGHPUT
    apart: bool = False  # drafters have a device of their own
    law: str = ""  # by which drafts are kept


USUAL_ENGINE = TracedEngine()


class Tracer:
    """Writes what a loop sees, chooses and gets; see `TraceSink`."""

    def __init__(
        self,
        file: IO[str],
        profile: Profile,
        names: Sequence[str],
        num_rows: int,
        max_ks: Sequence[int],
        engine: TracedEngine = USUAL_ENGINE,
        learnt: KeptLearning | None = None,
    ) -> None:
        """Begin a file. names, max_ks: by drafter. learnt: as for `make_loop`."""
        self._file = file
        self._names = names
        self._failed = False
        drafters = {"names": list(names), "num_rows": num_rows, "max_ks": list(max_ks)}
        known = {"format": TRACE_FORMAT, "profile": to_json(profile), **drafters}
        before = {} if learnt is None else {"learnt": learnt.to_json()}
        self._write(**known, objective=engine.objective, apart=engine.apart, law=engine.law, **before)

    def begun(self) -> None:
        """Note that a loop begins that has learnt nothing yet."""
        self._write(begun=True)

    def admitted(self, row: int, read: Mapping[int, int], *, rebirth: bool = False) -> None:
        """See `TraceSink.admitted`."""
        known = {self._names[drafter]: length for drafter, length in read.items()}
        more = ({"known": known} if known else {}) | ({"rebirth": True} if rebirth else {})
        self._write(admitted=row, **more)

    def forgotten(self, drafter: int) -> None:
        """See `TraceSink.forgotten`."""
        self._write(forgotten=drafter)

    def reused(self, num_rows: int, host_s: float, num_tokens: int) -> None:
        """See `TraceSink.reused`."""
        self._write(rested=num_rows, host_s=host_s, tokens=num_tokens)

    def planned(self, view: StepView, decision: Decision, group: int) -> None:
        """See `TraceSink.planned`."""
        previews = {str(drafter): _with_null(preview) for drafter, preview in view.previews.items()}
        seen = {
            "rows": view.rows.tolist(),
            "lengths": view.lengths.tolist(),
            "most": view.max_drafts.tolist(),
            "prefill": list(view.prefill.as_ints),
            "offers": previews,
            "wishes": {str(row): drafter for row, drafter in view.requested.items()},
            "waiting": view.num_waiting,
            "targets": {str(row): target_s for row, target_s in view.tpot_s.items()},
            "out": sorted(view.unavailable),
        }
        self._write(view=seen, ks=decision.ks.tolist(), drafters=decision.drafters.tolist(), group=group)

    def learnt(self, outcomes: Outcomes, prefill: Work, group: int, paid: Outcomes | None = None) -> None:
        """See `TraceSink.learnt`."""
        o = outcomes
        confidence = None if o.confidence is None else _with_null(o.confidence)
        arrays = {name: getattr(o, name).tolist() for name in ("rows", "drafters", "num_verified", "num_accepted")}
        seconds = {"draft_s": o.draft_s, "target_s": o.target_s, "host_s": o.host_s, "wait_s": o.wait_s}
        drafted = None if o.num_drafted is None else o.num_drafted.tolist()
        got = arrays | seconds | {"confidence": confidence, "num_drafted": drafted}
        got |= {name: list(some) for name in ("touched", "failed") if (some := getattr(o, name))}
        if o.num_own is not None:
            got["num_own"] = o.num_own.tolist()
        if paid is not None:
            got["with_branches"] = [paid.num_verified.tolist(), paid.num_accepted.tolist()]
        self._write(outcomes=got, prefill=list(prefill.as_ints), group=group)

    def _write(self, **values: Any) -> None:
        """Write a line. A full disk ends the trace, not the engine."""
        if self._failed:
            return
        try:
            self._file.write(json.dumps(values) + "\n")
        except OSError as error:
            self._failed = True
            log.warning("the trace ends here, as it cannot be written: %s", error)


def _with_null(confidence: NDArray[float64]) -> list[list[float | None]]:
    """Return confidence as JSON has it: null in place of NaN."""
    return [[None if np.isnan(c) else c for c in row] for row in confidence.tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of a replay."""

    view: StepView
    then: Decision  # decision of the run: only `ks` and `drafters`
    now: Decision  # decision of the replay
    outcomes: Outcomes
    overlap: OverlapCost | None  # price of overlapping two groups
    overlapped: bool  # the run did so
    dropped: NDArray[int64]  # [n] drafts of each row that were made and not verified
    dropped_tokens: float  # number of these that would have been kept, as estimated
    group: int = 0  # group of rows: 1 is the one that overlaps with 0


def replay(path: Path, on_step: Callable[[ClosedLoop, int], None] | None = None) -> Iterator[Step]:
    """Yield the steps of a trace, chosen again. Raises `ConfigError`.

    on_step: called between choice and outcome with the loop and its group.
    """
    lines = _read(path)
    try:
        header = next(lines)
        if header.get("format") != TRACE_FORMAT:
            raise ValueError(f"format {header.get('format')!r}, known: {TRACE_FORMAT!r}")
        profile, max_ks = from_json(header["profile"]), [int(k) for k in header["max_ks"]]
        objective = Objective.parse(header.get("objective", THROUGHPUT))
        num_rows, learnt = int(header["num_rows"]), KeptLearning.from_json(header.get("learnt"))
        new = partial(make_loop, profile, header["names"], num_rows, max_ks, objective=objective, learnt=learnt)
        known = (_with_rows(line, num_rows) for line in lines)
        yield from _steps(new, known, on_step, apart=bool(header.get("apart", False)))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, StopIteration) as error:
        raise ConfigError(f"{path} is no trace this version reads: {type(error).__name__} {error}") from None


class TraceHead(NamedTuple):
    """Facts about the engine of a trace."""

    names: tuple[str, ...]  # of its drafters, by index
    begun_with: str  # what an engine before it had learnt; empty: nothing
    law: str  # empty: it is not told


def read_head(path: Path) -> TraceHead:
    """Return what the first line of a trace tells of its engine. Raises `ConfigError`."""
    head = next(_read(path), {})
    learnt = KeptLearning.from_json(head.get("learnt"))
    return TraceHead(tuple(head.get("names", ())), learnt.about if learnt else "", str(head.get("law", "")))


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines, without a last one that was not written whole."""
    try:
        file_size(path)
        with path.open() as file:
            for line in file:
                try:
                    found = json.loads(line)
                except ValueError:
                    if line.endswith("\n"):
                        raise
                    return
                if not isinstance(found, dict):
                    raise ValueError(f"a line is no object: {line.strip()[:40]}")
                yield found
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from None


def _with_rows(line: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """Return a line unchanged. Raises `ValueError` if it names an unknown row."""
    rows = [*line.get("view", {}).get("rows", ()), *line.get("outcomes", {}).get("rows", ())]
    for row in (*rows, line.get("admitted", 0)):
        if not 0 <= row < num_rows:
            raise ValueError(f"row {row}: the engine had {num_rows}")
    return line


def _steps(
    new_loop: Callable[[], ClosedLoop],
    lines: Iterator[dict[str, Any]],
    on_step: Callable[[ClosedLoop, int], None] | None,
    *,
    apart: bool,
) -> Iterator[Step]:
    planned: dict[int, Decision] = {}  # by group, of the run
    loop = new_loop()
    for line in lines:
        group = int(line.get("group", 0))
        own = loop.second_group if group else loop
        if "begun" in line:
            loop = new_loop()
        elif "admitted" in line:
            known = {name: int(n) for name, n in line.get("known", {}).items()}
            loop.admit(int(line["admitted"]), known, rebirth=bool(line.get("rebirth")))
        elif "forgotten" in line:
            loop.forget_texts(loop.names[int(line["forgotten"])])
        elif "rested" in line:
            loop.reuse_plan(MANY_ROWS)  # as the run did
            rested = int(line["rested"])
            loop.observe_reused(rested, float(line["host_s"]), int(line.get("tokens", rested)))
        elif "view" in line:
            planned[group] = Decision(np.array(line["ks"], np.int64), np.array(line["drafters"], np.int64))
            own.plan(_view(line["view"]))
            if on_step:
                on_step(own, group)
        elif own.view is not None and own.decision is not None:
            outcomes = _outcomes(line["outcomes"])
            overlapped = outcomes.wait_s > 0
            overlap = planned_overlap(loop, apart=apart, overlapped=overlapped)
            dropped, worth = _dropped(own, outcomes)
            now = own.decision
            own.learn(outcomes, Work(*line["prefill"]), own.view, now, _paid(line["outcomes"], outcomes))
            yield Step(own.view, planned[group], now, outcomes, overlap, overlapped, dropped, worth, group)


def _dropped(loop: ClosedLoop, o: Outcomes) -> tuple[NDArray[int64], float]:
    """Return the trimmed drafts of each row, and how many would have been kept.

    Only drafts with a confidence are ever trimmed.
    """
    if o.confidence is None or not isinstance(loop.policy, Goodput):
        return np.zeros(len(o.rows), np.int64), 0.0
    made = np.isfinite(o.confidence).sum(axis=1)
    choice, drafted = loop.policy.choice, Drafted(o.rows, o.drafters, made, o.confidence)
    alive = alive_once_drafted(choice.models, drafted, choice.max_k)
    depths = np.arange(alive.shape[1])
    lost = (depths >= o.num_verified[:, None]) & (depths < made[:, None])
    return np.maximum(made - o.num_verified, 0), float(alive[lost].sum())


def _view(seen: dict[str, Any]) -> StepView:
    previews = {
        int(d): np.array(o, np.float64).reshape(len(o), len(o[0]) if o else 0) for d, o in seen["offers"].items()
    }
    return StepView(
        rows=np.array(seen["rows"], np.int64),
        lengths=np.array(seen["lengths"], np.int64),
        max_drafts=np.array(seen["most"], np.int64),
        prefill=Work(*seen["prefill"]),
        previews=previews,
        requested={int(row): int(drafter) for row, drafter in seen["wishes"].items()},
        num_waiting=int(seen["waiting"]),
        tpot_s={int(row): float(target_s) for row, target_s in seen.get("targets", {}).items()},
        unavailable=frozenset(map(int, seen.get("out", ()))),
    )


def _outcomes(got: dict[str, Any]) -> Outcomes:
    return Outcomes(
        rows=np.array(got["rows"], np.int64),
        drafters=np.array(got["drafters"], np.int64),
        num_verified=np.array(got["num_verified"], np.int64),
        num_accepted=np.array(got["num_accepted"], np.int64),
        draft_s=float(got["draft_s"]),
        target_s=float(got["target_s"]),
        host_s=float(got["host_s"]),
        confidence=None if got["confidence"] is None else np.array(got["confidence"], np.float64),
        wait_s=float(got.get("wait_s", 0.0)),
        num_drafted=None if got.get("num_drafted") is None else np.array(got["num_drafted"], np.int64),
        touched=tuple(map(float, got.get("touched", ()))),
        failed=tuple(map(int, got.get("failed", ()))),
        num_own=None if got.get("num_own") is None else np.array(got["num_own"], np.int64),
    )


def _paid(got: dict[str, Any], outcomes: Outcomes) -> Outcomes | None:
    """Return the outcomes with the tokens of branches; None if there were none."""
    if "with_branches" not in got:
        return None
    verified, accepted = (np.array(counts, np.int64) for counts in got["with_branches"])
    return replace(outcomes, num_verified=verified, num_accepted=accepted)
