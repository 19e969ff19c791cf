"""From a profile to the closed loop that an engine runs, or a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.control.controller import ClosedLoop
from paceline.control.cost import TableCost
from paceline.control.goodput import Goodput
from paceline.control.online import OnlineCost
from paceline.control.survival import conditional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.control.controller import Watcher
    from paceline.control.objective import Objective
    from paceline.control.profile import Profile


def make_loop(
    profile: Profile,
    names: Sequence[str],
    num_rows: int,
    max_ks: Sequence[int],
    watcher: Watcher | None = None,
    objective: Objective | None = None,
) -> ClosedLoop:
    """Return a loop that begins with what a profile says.

    names, max_ks: of the drafters, in the order of the profile's, which may call its only one by another name.
    """
    cost = step_cost(profile)
    if isinstance(cost, TableCost):  # of whole steps: what differs from it could not be told apart
        policy = Goodput(cost, num_rows, max_ks, _priors(profile, max_ks), objective)
        return ClosedLoop(policy, None, names, watcher)
    policy = Goodput(cost, num_rows, max_ks, _priors(profile, max_ks), objective, profile.minding)
    return ClosedLoop(policy, cost, names, watcher)


def step_cost(profile: Profile) -> OnlineCost | TableCost:
    """Return what steps cost, what the host takes included: whole steps, or their parts, to be corrected."""
    if isinstance(profile.cost, TableCost):
        return profile.cost
    return OnlineCost(profile.cost, float(profile.about.get("host_s", 0.0)))


def _priors(profile: Profile, max_ks: Sequence[int]) -> list[NDArray[float64] | None]:
    """Return the chances by depth that a profile knows: of its only drafter, or from drafters' training."""
    if profile.accepted_at and len(max_ks) == 1:
        return [_chances(profile.accepted_at, max_ks[0])]
    shares = profile.trained_to or ((),) * len(max_ks)
    return [_chances(s, k) if s else None for s, k in zip(shares, max_ks, strict=True)]


def _chances(accepted_at: tuple[float, ...], max_k: int) -> NDArray[float64]:
    """Return the chance of each position given the one before; deeper than is known, that of the last."""
    known = np.clip(conditional(np.maximum(accepted_at, 1e-9)), 0.01, 0.99)
    return known[np.minimum(np.arange(max_k), len(known) - 1)]
