"""Profiles: measured costs on disk, their fit, and the loop that begins with them.

All of this runs at start-up. On disk a profile is JSON, of Paceline's format or of vLLM's Dynamic SD proposal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isfinite
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.acceptance import conditional
from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TableCost, TargetCost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.control.controller import TraceSink
    from paceline.control.latency_target import Objective
    from paceline.control.policy import Work

ANY_DRAFTER = "any"  # name of a table's drafter, which the format does not tell
FORMAT = "paceline profile 1"
MAX_PROFILE_BYTES = 1 << 24
MAX_FIT_ROUNDS = 2000  # of coordinate descent
FIT_TOLERANCE = 1e-9  # change of a scaled price at which the descent ends
SHORT_CONTEXT = 48  # keys of a context that is too short to tell the price of keys from that of tokens
MIN_PRIOR, MAX_PRIOR = 0.01, 0.99  # chance of a position that estimates begin with


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Costs of a step on one machine, and acceptance as far as it was measured."""

    cost: MeasuredCost | TableCost
    drafters: tuple[str, ...] = ()  # names, in the order of `cost.drafters`
    accepted_at: tuple[float, ...] = ()  # [depth] share of all drafts that were kept there; empty: not measured
    about: Mapping[str, Any] = field(default_factory=dict)  # model, backend, threads, machine, date
    trained_acceptance: tuple[tuple[float, ...], ...] = ()  # by drafter: `accepted_at` reached in its training
    honours_stops: tuple[int, ...] = ()  # drafters that end a row's draft by its stop rule


# The loop that begins with a profile -----------------------------------------------------------------------------


def make_loop(
    profile: Profile,
    names: Sequence[str],
    num_rows: int,
    max_ks: Sequence[int],
    sink: TraceSink | None = None,
    objective: Objective | None = None,
) -> ClosedLoop:
    """Return a loop that begins with the costs and the acceptance of a profile.

    names, max_ks: of the drafters, in the order of the profile's, which may call its only one by another name.
    """
    cost, priors = step_cost(profile), _priors(profile, max_ks)
    if isinstance(cost, TableCost):  # of whole steps: an error has no known cause
        return ClosedLoop(Goodput(cost, num_rows, max_ks, priors, objective), None, names, sink)
    policy = Goodput(cost, num_rows, max_ks, priors, objective, profile.honours_stops)
    return ClosedLoop(policy, cost, names, sink)


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


# On disk -----------------------------------------------------------------------------------------


def read_profile(path: Path) -> Profile:
    """Read a profile of either format. Raises `ConfigError`."""
    try:
        if path.stat().st_size > MAX_PROFILE_BYTES:
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
    read = _read_table if isinstance(values, dict) and "batch_stats" in values else _read_own
    try:
        return read(values)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"is not a profile this version reads: {type(error).__name__} {error}") from None


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile atomically. Raises `OSError`."""
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
        return _table_json(cost, profile.accepted_at)
    target = cost.target
    return {
        "format": FORMAT,
        "about": dict(profile.about),
        "target": _curve(target.by_tokens)
        | {"unscored_s": target.unscored_s, "kv_token_s": target.kv_token_s, "pair_s": target.pair_s},
        "drafters": {
            name: [_curve(c) for c in drafter.by_rows]
            for name, drafter in zip(profile.drafters, cost.drafters, strict=True)
        },
        "accepted_at": list(profile.accepted_at),
        "trained_to": [list(shares) for shares in profile.trained_acceptance],
        "minding": list(profile.honours_stops),
    }


def _table_json(cost: TableCost, accepted_at: tuple[float, ...]) -> dict[str, Any]:
    by_k = list(zip(cost.ks.tolist(), cost.by_rows, strict=True))
    stats = {
        str(int(rows)): {str(int(k)): 1e3 * float(curve.seconds[i]) for k, curve in by_k}
        for i, rows in enumerate(cost.by_rows[0].counts)
    }
    return {"batch_stats": stats, "acceptance_rate_per_pos": list(accepted_at)}


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
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']!r}, known: {FORMAT!r}")
    t = values["target"]
    passes, unscored_s = _positive(_read_curve(t)), _price(t, "unscored_s")
    if passes.seconds[0] <= unscored_s * passes.counts[0]:
        raise ValueError(f"unscored_s is {unscored_s}: not to score a token saves more than its pass takes")
    target = TargetCost(passes, unscored_s, _price(t, "kv_token_s"), _price(t, "pair_s"))
    _price({"host_s": 0.0} | values["about"], "host_s")
    drafters = {
        name: DraftCost(tuple(_read_curve(c) for c in curves)) for name, curves in values["drafters"].items()
    }
    cost = MeasuredCost(target, tuple(drafters.values()))
    trained = tuple(tuple(map(float, shares)) for shares in values.get("trained_to", ()))
    honours_stops = tuple(int(drafter) for drafter in values.get("minding", ()))
    if not all(0 <= drafter < len(drafters) for drafter in honours_stops):
        raise ValueError(f"minding {honours_stops}: there are {len(drafters)} drafters")
    accepted_at = _shares(values["accepted_at"])
    return Profile(cost, tuple(drafters), accepted_at, values["about"], trained, honours_stops)


def _read_table(values: Mapping[str, Any]) -> Profile:
    """Read `batch_stats[rows][k]`, milliseconds of a step, and `acceptance_rate_per_pos`."""
    stats = {
        int(rows): {int(k): float(ms) / 1e3 for k, ms in by_k.items()}
        for rows, by_k in values["batch_stats"].items()
    }
    ks = sorted(set.intersection(*(set(by_k) for by_k in stats.values())))
    if not ks or ks[0] != 0:
        raise ValueError("batch_stats must have times for K = 0 at every batch size")
    sizes = sorted(stats)
    curves = tuple(Curve.of(sizes, [stats[rows][k] for rows in sizes]) for k in ks)
    _positive(curves[0])
    rates = _shares(values["acceptance_rate_per_pos"])
    return Profile(TableCost(np.array(ks, np.float64), curves), (ANY_DRAFTER,), rates)


def _shares(values: Sequence[Any]) -> tuple[float, ...]:
    """Return the share of drafts kept at each depth. Raises `ValueError`."""
    shares = tuple(map(float, values))
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError("how often drafts are kept is not a share, from 0 to 1")
    return shares


# Fit to timed steps ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimedPass:
    """Work of one kind of target pass, and its duration."""

    work: Work
    seconds: float


def fit_target(passes: Sequence[TimedPass]) -> TargetCost:
    """Return the prices with the least squared relative error, none negative.

    The curve has a point at every count of tokens that was timed with all tokens scored; keys and unscored tokens
    have one price each. If all contexts are short, the price of keys cannot be told from that of tokens and is 0.
    """
    counts = sorted({int(p.work.tokens) for p in passes if not p.work.unscored})
    rises = np.array([[_share(int(p.work.tokens), counts, i) for i in range(len(counts))] for p in passes])
    others = np.array([[p.work.kv_tokens, p.work.pairs, -p.work.unscored] for p in passes], np.float64)
    if all(int(p.work.pairs) < SHORT_CONTEXT * int(p.work.tokens) for p in passes):
        others[:, :2] = 0.0
    seconds = np.array([p.seconds for p in passes])
    prices = non_negative(np.hstack([rises, others]) / seconds[:, None], np.ones(len(passes)))
    kv_token_s, pair_s, unscored_s = prices[len(counts) :]
    curve = Curve.of(counts, np.cumsum(prices[: len(counts)]).tolist())
    return TargetCost(curve, float(unscored_s), float(kv_token_s), float(pair_s))


def fit_drafting(timed: Mapping[tuple[int, int], float]) -> DraftCost:
    """Return a drafter's prices from seconds by (rows, depth), interpolated between timed depths.

    Left out are depths at which the fewest rows were not timed, and rows that were not timed at all other depths.
    Without times drafting costs nothing.
    """
    if not timed:
        return DraftCost(())
    fewest = min(rows for rows, _ in timed)
    depths = sorted(d for r, d in timed if r == fewest)
    rows = [r for r in sorted({r for r, _ in timed}) if all((r, d) in timed for d in depths)]
    table = np.array([[timed[r, d] for d in depths] for r in rows])
    between = np.array([np.interp(range(depths[-1] + 1), [0, *depths], [0.0, *line]) for line in table])
    return DraftCost(tuple(Curve.of(rows, between[:, d].tolist()) for d in range(1, depths[-1] + 1)))


def _share(count: int, counts: Sequence[int], index: int) -> float:
    """Return the share of a rise between counts below `count`; above 1 beyond the last."""
    if index == 0:
        return 1.0
    low, high = counts[index - 1], counts[index]
    limit = float("inf") if index == len(counts) - 1 else 1.0
    return min(max((count - low) / (high - low), 0.0), limit)


def non_negative(matrix: NDArray[float64], target: NDArray[float64]) -> NDArray[float64]:
    """Return x >= 0 with the smallest |matrix x - target|, by coordinate descent."""
    scale = np.sqrt((matrix**2).sum(axis=0))
    scale[scale == 0] = 1.0
    a = matrix / scale
    gram, wanted = a.T @ a, a.T @ target
    x = np.zeros(a.shape[1])
    for _ in range(MAX_FIT_ROUNDS):
        before = x.copy()
        for i in range(len(x)):
            if gram[i, i] > 0:
                x[i] = max(0.0, x[i] + (wanted[i] - gram[i] @ x) / gram[i, i])
        if np.abs(x - before).max() < FIT_TOLERANCE:
            break
    found: NDArray[float64] = x / scale
    return found
