"""Files of control: profiles, the loop that begins with one, traces, and their replay.

A profile has the measured costs of a machine, as JSON of Paceline's format or of vLLM's Dynamic SD proposal
(`dynamic_table.py`). It is read at start-up. A trace has a run of the controller as JSON lines: first the profile,
then the view and the outcome of each step. Everything that a policy does follows from these, so a replay makes the
same choices. Keys on disk keep the names that version 1 gave them.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from secrets import token_hex
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from paceline.control.branching import Branching
from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, ExpertCost, MeasuredCost, TableCost, TargetCost
from paceline.control.dynamic_table import DEEPEST, STATS, read_table, shares, table_json, unused_fields
from paceline.control.goodput import Goodput
from paceline.control.learnt import KeptLearning
from paceline.control.online_cost import OnlineCost
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

    from paceline.control.overlap import OverlapCost
    from paceline.control.protocols import TraceSink

log = logging.getLogger(__name__)

ANY_DRAFTER = "any"  # name of a table's drafter, which the format does not tell
PROFILE_FORMAT = "paceline profile 1"
MAX_PROFILE_BYTES = 1 << 24
MIN_PRIOR, MAX_PRIOR = 0.01, 0.99  # chance of a position that estimates begin with
TRACE_FORMAT = "paceline trace 1"


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Costs of a step on one machine, and acceptance as far as it was measured."""

    cost: MeasuredCost | TableCost
    drafters: tuple[str, ...] = ()  # names, in the order of `cost.drafters`
    accepted_at: tuple[float, ...] = ()  # [depth] share of all drafts that were kept there; empty: not measured
    about: Mapping[str, Any] = field(default_factory=dict)  # model, threads...; of a table its other fields
    trained_acceptance: tuple[tuple[float, ...], ...] = ()  # by drafter: `accepted_at` reached in its training
    honours_stops: tuple[int, ...] = ()  # drafters that end a row's draft by its stop rule
    late: tuple[int, ...] = ()  # drafters on the target's device

    @property
    def max_k(self) -> int | None:
        """Deepest draft of a row that a table of whole steps allows; None: no bound."""
        return self.about.get(DEEPEST) if isinstance(self.cost, TableCost) else None

    @property
    def unused(self) -> tuple[str, ...]:
        """Lines about fields of its file that decide nothing here."""
        return unused_fields(self.about) if isinstance(self.cost, TableCost) else ()


# The loop that begins with a profile -----------------------------------------------------------------------------


def make_loop(
    profile: Profile,
    names: Sequence[str],
    num_rows: int,
    max_ks: Sequence[int],
    sink: TraceSink | None = None,
    objective: Objective | None = None,
    branches: Sequence[int] = (),
    learnt: KeptLearning | None = None,
) -> ClosedLoop:
    """Return a loop that begins with the costs and the acceptance of a profile.

    names, max_ks: of the drafters, in the order of the profile's, which may call its only one by another name.
    branches: tokens of branches that each hands out, at most; empty: none does.
    learnt: by an engine before, which counts for more.
    """
    cost, priors = step_cost(profile), _priors(profile, max_ks)
    if isinstance(cost, TableCost):  # of whole steps: an error has no known cause
        return ClosedLoop(Goodput(cost, num_rows, max_ks, priors, objective), None, names, sink)
    policy = Goodput(cost, num_rows, max_ks, priors, objective, profile.honours_stops, profile.late)
    branching = None
    if any(branches):
        indices = {name: index for index, name in enumerate(names)}
        branching = Branching(cost, policy.choice.models, branches, indices)
    loop = ClosedLoop(policy, cost, names, sink, branching=branching)
    if learnt is not None:
        learnt.begin(loop)
    return loop


def step_cost(profile: Profile) -> OnlineCost | TableCost:
    """Return prices of steps: of whole steps, or of their parts, to be corrected."""
    if isinstance(profile.cost, TableCost):
        return profile.cost
    return OnlineCost(profile.cost, float(profile.about.get("host_s", 0.0)))


def _priors(profile: Profile, max_ks: Sequence[int]) -> list[NDArray[float64] | None]:
    """Return the known chances by depth: of a profile's only drafter, or from drafters' training."""
    if profile.accepted_at and len(max_ks) == 1:
        return [_chances(profile.accepted_at, max_ks[0])]
    shares = profile.trained_acceptance or ((),) * len(max_ks)
    return [_chances(s, k) if s else None for s, k in zip(shares, max_ks, strict=True)]


def _chances(accepted_at: tuple[float, ...], max_k: int) -> NDArray[float64]:
    """Return the chance of each position given the one before, the last one repeated."""
    known = np.clip(conditional(np.maximum(accepted_at, 1e-9)), MIN_PRIOR, MAX_PRIOR)
    return known[np.minimum(np.arange(max_k), len(known) - 1)]


def conditional(accepted_at: NDArray[float64] | tuple[float, ...]) -> NDArray[float64]:
    """Return the chance of each position given the one before. [max_depth]

    accepted_at: share of all drafts accepted at each depth. Behind a depth at which none was, the chance is 0.
    """
    rates = np.asarray(accepted_at, np.float64)
    before = np.concatenate(([1.0], rates[:-1]))
    found: NDArray[float64] = np.divide(rates, before, out=np.zeros(len(rates)), where=before > 0)
    return found


# Profiles on disk -----------------------------------------------------------------------------------------


def read_profile(path: Path) -> Profile:
    """Read a profile of either format. Raises `ConfigError`."""
    try:
        if file_size(path) > MAX_PROFILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_PROFILE_BYTES >> 20} MiB; is it a profile?")
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a profile: {error}") from None
    try:
        return from_json(values)
    except ConfigError as error:
        raise ConfigError(f"{path} {error}") from None


def from_json(values: Any) -> Profile:
    """Return a profile of either format. Raises `ConfigError`."""
    try:
        if isinstance(values, dict) and STATS in values:
            cost, accepted_at, others = read_table(values)
            _positive(cost.by_rows[0])
            return Profile(cost, (ANY_DRAFTER,), accepted_at, others)
        return _read_own(values)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"is not a profile this version reads: {type(error).__name__} {error}") from None


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile atomically: other processes see the old or new file. Raises `OSError`."""
    part = path.with_name(f"{path.name}.{token_hex(8)}.part")  # of its own: two may write at once
    try:
        part.write_text(json.dumps(to_json(profile), indent=1))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def to_json(profile: Profile) -> dict[str, Any]:
    """Return what `from_json` reads."""
    cost = profile.cost
    if isinstance(cost, TableCost):
        return table_json(cost, profile.accepted_at, profile.about)
    target = cost.target
    return {
        "format": PROFILE_FORMAT,
        "about": dict(profile.about),
        "target": _curve(target.by_tokens)
        | {"unscored_s": target.unscored_s, "kv_token_s": target.kv_token_s, "pair_s": target.pair_s}
        | ({"experts": _curve(e.touched) | {"read_s": e.read_s}} if (e := target.experts) else {}),
        "drafters": {
            name: [_curve(c) for c in drafter.by_rows]
            for name, drafter in zip(profile.drafters, cost.drafters, strict=True)
        },
        "accepted_at": list(profile.accepted_at),
        "trained_to": [list(shares) for shares in profile.trained_acceptance],
        "minding": list(profile.honours_stops),
        "late": list(profile.late),
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {"counts": curve.counts.tolist(), "seconds": curve.seconds.tolist(), "stepped": curve.stepped}


def _read_curve(values: Mapping[str, Any]) -> Curve:
    return Curve.of(values["counts"], values["seconds"], stepped=bool(values["stepped"]))


def _positive(passes: Curve) -> Curve:
    """Return the costs of target passes. Raises `ValueError` if some cost nothing."""
    if passes.seconds[0] <= 0:
        raise ValueError("a pass of the target takes no time: its seconds are above 0")
    return passes


def _price(values: Mapping[str, Any], name: str) -> float:
    """Return a price in seconds. Raises `ValueError` unless it is finite and not negative."""
    seconds = float(values[name])
    if not (isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name} is {seconds}: prices are finite and not negative")
    return seconds


def _read_own(values: Mapping[str, Any]) -> Profile:
    if values["format"] != PROFILE_FORMAT:
        raise ValueError(f"format {values['format']!r}, known: {PROFILE_FORMAT!r}")
    t = values["target"]
    passes, unscored_s = _positive(_read_curve(t)), _price(t, "unscored_s")
    if passes.seconds[0] <= unscored_s * passes.counts[0]:
        raise ValueError(f"unscored_s is {unscored_s}: not to score a token saves more than its pass takes")
    touched = t.get("experts")
    experts = touched and ExpertCost(_price(touched, "read_s"), _read_curve(touched))
    target = TargetCost(passes, unscored_s, _price(t, "kv_token_s"), _price(t, "pair_s"), experts or None)
    _price({"host_s": 0.0} | values["about"], "host_s")
    drafters = {
        name: DraftCost(tuple(_read_curve(c) for c in curves)) for name, curves in values["drafters"].items()
    }
    cost = MeasuredCost(target, tuple(drafters.values()))
    trained = tuple(tuple(map(float, shares)) for shares in values.get("trained_to", ()))
    honours_stops, late = (_indices(values, name, len(drafters)) for name in ("minding", "late"))
    accepted_at = shares(values["accepted_at"])
    return Profile(cost, tuple(drafters), accepted_at, values["about"], trained, honours_stops, late)


def _indices(values: Mapping[str, Any], name: str, num_drafters: int) -> tuple[int, ...]:
    """Return the drafters that a field lists. Raises `ValueError` if there are no such drafters."""
    found = tuple(int(drafter) for drafter in values.get(name, ()))
    if not all(0 <= drafter < num_drafters for drafter in found):
        raise ValueError(f"{name} {found}: there are {num_drafters} drafters")
    return found


# Traces ------------------------------------------------------------------------------------------


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
        self._failed = False
        drafters = {"names": list(names), "num_rows": num_rows, "max_ks": list(max_ks)}
        known = {"format": TRACE_FORMAT, "profile": to_json(profile), **drafters}
        before = {} if learnt is None else {"learnt": learnt.to_json()}
        self._write(**known, objective=engine.objective, apart=engine.apart, law=engine.law, **before)

    def begun(self) -> None:
        """Note that a loop begins that has learnt nothing yet."""
        self._write(begun=True)

    def admitted(self, row: int) -> None:
        """See `TraceSink.admitted`."""
        self._write(admitted=row)

    def reused(self, num_rows: int, host_s: float) -> None:
        """See `TraceSink.reused`."""
        self._write(rested=num_rows, host_s=host_s)

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

    def learnt(self, outcomes: Outcomes, prefill: Work, group: int) -> None:
        """See `TraceSink.learnt`."""
        o = outcomes
        confidence = None if o.confidence is None else _with_null(o.confidence)
        arrays = {name: getattr(o, name).tolist() for name in ("rows", "drafters", "num_verified", "num_accepted")}
        seconds = {"draft_s": o.draft_s, "target_s": o.target_s, "host_s": o.host_s, "wait_s": o.wait_s}
        drafted = None if o.num_drafted is None else o.num_drafted.tolist()
        got = arrays | seconds | {"confidence": confidence, "num_drafted": drafted}
        got |= {"touched": list(o.touched)} if o.touched else {}
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


# Replay ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of a replay."""

    view: StepView
    then: Decision  # of the run: `ks` and `drafters`
    now: Decision  # of the replay
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


def drafter_names(path: Path) -> tuple[str, ...]:
    """Return the names of a trace's drafters by index. Raises `ConfigError`."""
    return tuple(next(_read(path), {}).get("names", ()))


def begun_with(path: Path) -> str:
    """Return what an earlier engine had learnt for a trace's; empty: nothing. Raises `ConfigError`."""
    learnt = KeptLearning.from_json(next(_read(path), {}).get("learnt"))
    return "" if learnt is None else learnt.about


def law_name(path: Path) -> str:
    """Return the law of a trace's engine, empty if it is not told. Raises `ConfigError`."""
    return str(next(_read(path), {}).get("law", ""))


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
            loop.admit(int(line["admitted"]))
        elif "rested" in line:
            loop.reuse_plan(MANY_ROWS)  # as the run did
            loop.observe_reused(int(line["rested"]), float(line["host_s"]))
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
            own.learn(outcomes, Work(*line["prefill"]), own.view, now)
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
    )
