"""Profiles of control, and the loop that begins with one.

A profile has the measured costs of a machine, as JSON of Paceline's format or of vLLM's Dynamic SD proposal
(`dynamic_table.py`). It is read at start-up. Keys on disk keep the names that version 1 gave them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isfinite
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.branching import Branching
from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, ExpertCost, MeasuredCost, TableCost, TargetCost
from paceline.control.dynamic_table import DEEPEST, STATS, read_table, shares, table_json, unused_fields
from paceline.control.goodput import Goodput
from paceline.control.learnt import begin_with
from paceline.control.online_cost import OnlineCost
from paceline.control.reading import ReadLimits
from paceline.control.row_by_row import Objective
from paceline.core.errors import ConfigError
from paceline.core.nouns import WHOLE_TEXT
from paceline.core.system import file_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.control.learnt import KeptLearning
    from paceline.control.protocols import TraceSink


ANY_DRAFTER = "any"  # name of a table's drafter, which the format does not tell
PROFILE_FORMAT = "paceline profile 1"
MAX_PROFILE_BYTES = 1 << 24
MIN_PRIOR, MAX_PRIOR = 0.01, 0.99  # bounds of the chances that estimates begin with


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
    reads: tuple[ReadLimits, ...] = ()  # by drafter; empty: none reads texts beyond drafting

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

    names, max_ks: of the drafters, in the profile's order; a profile of one drafter may have another name for it.
    branches: by drafter, the most branch tokens that it hands out; empty: none does.
    learnt: what an earlier engine learnt; it overrides the profile.
    """
    cost, priors = step_cost(profile), _priors(profile, max_ks)
    if isinstance(cost, TableCost):  # not corrected: the error of a whole step has no known cause
        return ClosedLoop(Goodput(cost, num_rows, max_ks, priors, objective), None, names, sink)
    policy = Goodput(cost, num_rows, max_ks, priors, objective, profile.honours_stops, profile.late)
    branching = None
    if any(branches):
        indices = {name: index for index, name in enumerate(names)}
        branching = Branching(cost, policy.choice.models, branches, indices)
    loop = ClosedLoop(policy, cost, names, sink, branching=branching)
    if learnt is not None:
        begin_with(loop, learnt)
    return loop


def step_cost(profile: Profile) -> OnlineCost | TableCost:
    """Return prices: of whole steps, fixed, or of a step's parts, which steps correct."""
    if isinstance(profile.cost, TableCost):
        return profile.cost
    return OnlineCost(profile.cost, float(profile.about.get("host_s", 0.0)), profile.reads)


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

    accepted_at: share of all drafts accepted at each depth. After a depth where none was, the chance is 0.
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
    part = path.with_name(f"{path.name}.{token_hex(8)}.part")  # its own name: two processes may write at once
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
        "reads": [list(limits) for limits in profile.reads],
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
    reads = _read_limits(values.get("reads", ()), len(drafters))
    return Profile(cost, tuple(drafters), accepted_at, values["about"], trained, honours_stops, late, reads)


def _read_limits(values: Sequence[Sequence[int]], num_drafters: int) -> tuple[ReadLimits, ...]:
    """Return limits by drafter; none in older files. Raises `ValueError`."""
    found = tuple(ReadLimits(int(of_row), int(in_step)) for of_row, in_step in values)
    if len(found) not in {0, num_drafters} or not all(0 <= n <= WHOLE_TEXT for limits in found for n in limits):
        raise ValueError(f"reads {found}: there are {num_drafters} drafters")
    return found


def _indices(values: Mapping[str, Any], name: str, num_drafters: int) -> tuple[int, ...]:
    """Return the drafters that a field lists. Raises `ValueError` if there are no such drafters."""
    found = tuple(int(drafter) for drafter in values.get(name, ()))
    if not all(0 <= drafter < num_drafters for drafter in found):
        raise ValueError(f"{name} {found}: there are {num_drafters} drafters")
    return found
