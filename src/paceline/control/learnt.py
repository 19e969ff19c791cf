"""Learning of a controller, kept for the next engine of its kind.

The file has acceptance by depth, corrections of prices, and for each load how far drafting kept its promises.
These are numbers by drafter, and nothing of any text. They count like a few dozen steps, and less with each day,
so other traffic soon overrules them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from math import log
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta, Struct

from paceline.control.acceptance import DEPTH_SD, MAX_LOGIT
from paceline.control.cost import NUM_SIZES
from paceline.control.goodput import Goodput
from paceline.control.plan_reuse import KindMeans
from paceline.control.probes import FEW, FREE_PLAIN_PROBES
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.control.acceptance import AcceptanceModel
    from paceline.control.controller import ClosedLoop
    from paceline.control.online_cost import OnlineCost

MAX_LEARNT_BYTES = 1 << 18
MAX_AGE_DAYS = 30.0
MIN_PASSES = 32  # passes after which what an engine learnt is worth keeping
SECONDS_A_DAY = 86_400.0

KEPT_SD = 0.4  # logits: standard deviation that an intercept gains until the next start ...
DAY_SD = 0.1  # ... and with each day between
KEPT_WEIGHT_SD = 0.1  # standard deviation that the confidence weight gains until the next start
KEPT_CONFIDENCES = 32.0  # most confidences that a kept mean counts as
KEPT_STEPS = 16  # most steps that a kept price counts as
KEPT_KEY_VARIANCE = 0.1  # variance of a kept price of a key, in measured prices squared
MAX_FACTOR = 16.0  # largest ratio of a price to its measurement, or of gain to promise, that is believed
MAX_VARIANCE = 64.0
MAX_S = 60.0

_Logit = Annotated[float, Meta(ge=-MAX_LOGIT, le=MAX_LOGIT)]
_Variance = Annotated[float, Meta(ge=0.0, le=MAX_VARIANCE)]
_LogFactor = Annotated[float, Meta(ge=-log(MAX_FACTOR), le=log(MAX_FACTOR))]
_Factor = Annotated[float, Meta(ge=1 / MAX_FACTOR, le=MAX_FACTOR)]
_Seconds = Annotated[float, Meta(ge=0.0, le=MAX_S)]
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_BY_DEPTH, _BY_SIZE, _TWO = (
    Meta(max_length=64),
    Meta(min_length=NUM_SIZES, max_length=NUM_SIZES),
    Meta(min_length=2, max_length=2),
)
_FEW = Meta(max_length=16)


class KeptAcceptance(Struct, frozen=True, forbid_unknown_fields=True):
    """Estimates of a drafter, without those of rows."""

    depth_logit: Annotated[list[_Logit], _BY_DEPTH]
    depth_var: Annotated[list[_Variance], _BY_DEPTH]
    mean_confidence: Annotated[list[_Logit], _BY_DEPTH]
    num_confidences: Annotated[list[Annotated[float, Meta(ge=0.0, le=1e6)]], _BY_DEPTH]
    shared: Annotated[list[_Variance], Meta(min_length=3, max_length=3)]  # as `AcceptanceModel.shared`


class KeptPrices(Struct, frozen=True, forbid_unknown_fields=True):
    """Corrections of measured costs.

    The drift of the machine, which comes and goes, is left out.
    """

    log_error: Annotated[list[_LogFactor], _BY_SIZE]
    seen: Annotated[list[_Count], _BY_SIZE]
    key_s: _Seconds
    draft_factor: Annotated[list[_Factor], _FEW]
    draft_steps: Annotated[list[_Count], _FEW]
    host_row_s: Annotated[list[_Seconds], _TWO]
    host_seen: Annotated[list[_Count], _TWO]
    read_token_s: Annotated[list[_Seconds], _FEW] = []  # of reading, by drafter; empty in older versions' files


class KeptRatio(Struct, frozen=True, forbid_unknown_fields=True):
    """Realised ratio of one kind of step at one load, and the number of steps."""

    ratio: _Factor
    steps: _Count


class Learnt(Struct, frozen=True, forbid_unknown_fields=True):
    """All that is kept of a controller."""

    key: Annotated[str, Meta(max_length=64)]  # of model, drafters, machine and build
    model: Annotated[str, Meta(max_length=128)]  # name for `paceline list`
    learnt_at: Annotated[float, Meta(ge=0.0, le=1e11)]  # seconds since 1970
    passes: _Count  # of all engines whose knowledge is in it
    acceptance: Annotated[dict[Annotated[str, Meta(max_length=64)], KeptAcceptance], _FEW]
    prices: KeptPrices | None
    loads: Annotated[dict[int, tuple[KeptRatio | None, KeptRatio | None]], _FEW]  # by `load_of` the rows
    format: Literal["paceline learnt 2"] = "paceline learnt 2"

    @property
    def about(self) -> str:
        """Its size and day, for the banner and `explain`."""
        day = datetime.fromtimestamp(self.learnt_at, UTC)
        return f"{self.passes} passes learnt on {day:%Y-%m-%d}"


def to_bytes(learnt: Learnt) -> bytes:
    """Return what `from_bytes` reads."""
    return msgspec.json.encode(learnt)


def from_bytes(data: bytes) -> Learnt:
    """Read what was kept. Raises `ConfigError`."""
    if len(data) > MAX_LEARNT_BYTES:
        raise ConfigError(f"it has {len(data)} bytes, more than {MAX_LEARNT_BYTES}")
    try:
        found = msgspec.json.decode(data, type=Learnt)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"it is not what this version writes: {error}") from None
    return found


@dataclass(frozen=True, slots=True)
class KeptLearning:
    """Learning of an earlier engine, with its age."""

    learnt: Learnt
    days: float

    @classmethod
    def usable(cls, learnt: Learnt, key: str, now_s: float) -> Self:
        """Take what was kept, if by this kind of engine and not too old.

        Raises `ConfigError` otherwise.
        """
        if learnt.key != key:
            raise ConfigError("it is of another model, machine or build")
        days = max(now_s - learnt.learnt_at, 0.0) / SECONDS_A_DAY
        if days > MAX_AGE_DAYS:
            raise ConfigError(f"it is older than {MAX_AGE_DAYS:g} days")
        return cls(learnt, days)

    @property
    def about(self) -> str:
        """See `Learnt.about`."""
        return self.learnt.about

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {"days": self.days, "of": msgspec.to_builtins(self.learnt, str_keys=True)}

    @classmethod
    def from_json(cls, values: Any) -> Self | None:
        """Read the part of a trace; None if there was nothing. Raises `ConfigError`."""
        if values is None:
            return None
        try:
            of, days = msgspec.json.encode(values["of"]), float(values["days"])
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"it is no trace's part about what was learnt: {error!r}") from None
        if not 0.0 <= days <= MAX_AGE_DAYS:
            raise ConfigError(f"what was learnt is {days} days old, and may be {MAX_AGE_DAYS:g}")
        return cls(from_bytes(of), days)


# Out of a loop -----------------------------------------------------------------------------------


def learnt_by(loop: ClosedLoop, key: str, model: str, now_s: float, before: Learnt | None = None) -> Learnt | None:
    """Return what a loop has learnt; None if it is too little.

    before: what it began with.
    """
    policy = loop.policy
    if not isinstance(policy, Goodput) or policy.num_steps < MIN_PASSES:
        return None
    loop.finish()
    by_load = policy.hysteresis.means.by_load
    return Learnt(
        key,
        model,
        now_s,
        policy.num_steps + (before.passes if before else 0),
        {name: _acceptance(m) for name, m in zip(loop.names, policy.choice.models, strict=True)},
        None if loop.cost is None else _prices(loop.cost),
        {load: (_ratio(plain), _ratio(drafting)) for load, (plain, drafting) in by_load.items()},
    )


def _acceptance(model: AcceptanceModel) -> KeptAcceptance:
    logits, means = (np.clip(a, -MAX_LOGIT, MAX_LOGIT) for a in (model.depth_logit, model.mean_confidence))
    shared = np.clip(model.shared, 0.0, MAX_VARIANCE)
    return KeptAcceptance(*(a.tolist() for a in (logits, model.depth_var, means, model.num_confidences, shared)))


def _prices(cost: OnlineCost) -> KeptPrices:
    errors = np.clip(cost.passes.log_error, -log(MAX_FACTOR), log(MAX_FACTOR))
    return KeptPrices(
        errors.tolist(),
        cost.passes.seen.tolist(),
        min(cost.kv_token_s, MAX_S),
        np.clip(cost.draft_factor, 1 / MAX_FACTOR, MAX_FACTOR).tolist(),
        cost.draft_steps.tolist(),
        np.clip(cost.host.row_s, 0.0, MAX_S).tolist(),
        cost.host.seen.tolist(),
        np.clip(cost.reading.token_s, 0.0, MAX_S).tolist(),
    )


def _ratio(kind: KindMeans) -> KeptRatio | None:
    ratio = min(max(kind.realised_ratio, 1 / MAX_FACTOR), MAX_FACTOR)
    return KeptRatio(ratio, kind.seen) if kind.known else None


# Into a loop -------------------------------------------------------------------------------------


def begin_with(loop: ClosedLoop, before: KeptLearning) -> None:
    """Give a fresh loop what was learnt before. Parts of another shape are left out."""
    policy, learnt = loop.policy, before.learnt
    if not isinstance(policy, Goodput):
        return
    for name, model in zip(loop.names, policy.choice.models, strict=True):
        if (kept := learnt.acceptance.get(name)) is not None:
            _take_acceptance(model, kept, before.days)
    if learnt.prices is not None and loop.cost is not None:
        _take_prices(loop.cost, learnt.prices)
    for load, ratios in learnt.loads.items():
        plain, drafting = (KindMeans(first_ratio=kept.ratio if kept else None) for kept in ratios)
        policy.hysteresis.means.by_load[load] = plain, drafting
    num_plain = policy.exploration.probes.num_plain
    num_plain |= dict.fromkeys((FEW, *learnt.loads), FREE_PLAIN_PROBES)


def _take_acceptance(model: AcceptanceModel, kept: KeptAcceptance, days: float) -> None:
    by_depth = kept.depth_logit, kept.depth_var, kept.mean_confidence, kept.num_confidences
    if any(len(values) != model.max_depth for values in by_depth):
        return
    logits, variances, means, numbers = map(np.array, by_depth)
    gained = KEPT_SD**2 + DAY_SD**2 * max(days, 0.0)
    model.depth_logit[:] = logits
    model.depth_var[:] = np.minimum(variances + gained, DEPTH_SD**2)
    model.mean_confidence[:] = means
    model.num_confidences[:] = np.minimum(numbers, KEPT_CONFIDENCES)
    model.shared[:] = kept.shared
    model.shared[2] += KEPT_WEIGHT_SD**2
    model.row_var[:] = model.shared[0]


def _take_prices(cost: OnlineCost, kept: KeptPrices) -> None:
    if len(kept.draft_factor) != len(cost.draft_factor) or len(kept.draft_steps) != len(cost.draft_steps):
        return
    passes = cost.passes
    passes.log_error[:] = kept.log_error
    passes.seen[:] = _counted(kept.seen)
    passes.seconds[:] = passes.measured_s * np.exp(passes.log_error)[passes.size_class]
    cost.key_price[:] = kept.key_s, KEPT_KEY_VARIANCE
    cost.draft_factor[:] = kept.draft_factor
    cost.draft_steps[:] = _counted(kept.draft_steps)
    cost.host.row_s[:] = kept.host_row_s
    cost.host.seen[:] = _counted(kept.host_seen)
    if len(kept.read_token_s) == len(cost.reading.token_s):
        cost.reading.token_s[:] = kept.read_token_s


def _counted(steps: Sequence[int]) -> NDArray[int64]:
    """Return how many steps a kept number of steps counts as."""
    return np.minimum(steps, KEPT_STEPS)
