"""Routing rules of other systems, on the router's seam, to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.routing import ROUTES, Seconds, policy_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.control.routing import Columns, RequestView, RoutingPolicy, Why


@dataclass(frozen=True, slots=True)
class GatedPrefix:
    """The rule of SGLang's gateway: the longest match, unless the fleet is out of balance.

    Balance is of the whole fleet: if one replica has many more requests than another, all requests go to the least
    busy. If less than `least_share` of a prompt is kept, the gateway takes the replica with the smallest tree of
    prompts; here this is the replica with the fewest open requests.
    """

    least_share: float = 0.3
    most_apart: int = 64  # requests
    most_ratio: float = 1.5
    why: Why = "pages"

    def prices(self, request: RequestView, replicas: Columns, recent: NDArray[float64]) -> NDArray[float64]:
        """Return kept pages, negative, or open requests. [n]"""
        loads = replicas.open_rows.astype(np.float64)
        most, least = loads[replicas.may].max(), loads[replicas.may].min()
        if most - least > self.most_apart and most > self.most_ratio * least:
            return loads
        kept = (replicas.hit_pages * replicas.may).astype(np.float64)
        if kept.max() * request.page_tokens <= self.least_share * request.prompt_tokens:
            return loads
        return -kept


RIVALS: dict[str, Callable[[], RoutingPolicy]] = {
    "sglang": GatedPrefix,
    "bare-seconds": partial(Seconds, anew=1.0, open_share=0.0, recent_share=0.0),
}


def any_route(name: str) -> RoutingPolicy:
    """Return a routing policy of ours or of others. Raises `ConfigError`."""
    return policy_named(name, ROUTES | RIVALS)
