"""Deaths of replicas: alone, by racks, or in waves as of spot machines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy import int64
    from numpy.typing import NDArray

    Picks = Callable[[np.random.Generator, int, float], NDArray[int64]]

MOST_AN_HOUR = 1e5  # highest rate of deaths
MOST_DEATHS = 1_000_000  # most deaths of a run: with more, replicas die before they can answer
FORM = re.compile(r"(?:(?P<kind>[a-z]+):)?(?P<rate>[0-9.]+)/h(?:,(?P<size>[0-9.]+))?")


class Death(NamedTuple):
    """Replicas that die at once."""

    at_s: float
    replicas: tuple[int, ...]


def _one(rng: np.random.Generator, num_replicas: int, _size: float) -> NDArray[int64]:
    return rng.integers(num_replicas, size=1)


def _rack(rng: np.random.Generator, num_replicas: int, size: float) -> NDArray[int64]:
    """Return the replicas of a random rack, `size` neighbours."""
    racks = -(-num_replicas // int(size))
    first = int(rng.integers(racks)) * int(size)
    return np.arange(first, min(first + int(size), num_replicas))


def _wave(rng: np.random.Generator, num_replicas: int, size: float) -> NDArray[int64]:
    """Return random replicas, on average the share `size` of all."""
    return np.flatnonzero(rng.random(num_replicas) < size)


KINDS: dict[str, tuple[Picks, float | None, float]] = {  # picks, size if none is given, largest size
    "exponential": (_one, 1.0, 1.0),
    "rack": (_rack, 8.0, 4096.0),
    "waves": (_wave, 0.25, 1.0),
}


def deaths(spec: str, num_replicas: int, seed: int = 0) -> Iterator[Death]:
    """Return the deaths of a run as they come, without end. Raises `ConfigError`.

    spec: `RATE/h` or `exponential:RATE/h`, one replica of the fleet at a time; `rack:RATE/h,REPLICAS`;
    `waves:RATE/h,SHARE`. The rate is of the whole fleet. Times between deaths are exponential.
    """
    return _drawn(spec, num_replicas, *_parsed(spec), np.random.default_rng(seed))


def _drawn(
    spec: str, num_replicas: int, picks: Picks, rate: float, size: float, rng: np.random.Generator
) -> Iterator[Death]:
    at_s = 0.0
    for _ in range(MOST_DEATHS):
        at_s += float(rng.exponential(3600 / rate))
        yield Death(at_s, tuple(picks(rng, num_replicas, size).tolist()))
    raise ConfigError(f"--deaths {spec}: after {MOST_DEATHS} of them there are requests without an answer")


def _parsed(spec: str) -> tuple[Picks, float, float]:
    match = FORM.fullmatch(spec)
    kind = (match["kind"] or "exponential") if match else ""
    try:
        if match is None or kind not in KINDS:
            raise ValueError
        picks, usual, largest = KINDS[kind]
        rate, size = float(match["rate"]), float(match["size"] or usual or 0)
    except ValueError:
        raise ConfigError(f"--deaths {spec}: write RATE/h, rack:RATE/h,REPLICAS or waves:RATE/h,SHARE") from None
    smallest = 1.0 if largest > 1 else 0.0
    if not (0 < rate <= MOST_AN_HOUR and smallest <= size <= largest and size):
        raise ConfigError(f"--deaths {spec}: at most {MOST_AN_HOUR:.0f} an hour, of up to {largest:g} at once")
    return picks, rate, size
