"""The type in which a drafter that a backend runs beside its target keeps its weights."""

from __future__ import annotations

from paceline.core.errors import ConfigError, suggest

# Of native drafters. Guesses are checked, so four bits, which are read in half the time, cost one now and then and
# no text. Where the target keeps floats, so does the drafter.
NATIVE_TYPES = ("int4_row", "int8", "bf16", "f32")
_IN_FOUR_BITS = ("int8", "int4")


def native_type(asked: str | None, target: str) -> str:
    """Return a native drafter's type beside a target's. Raises `ConfigError` for one that there is not."""
    if asked is None:
        return NATIVE_TYPES[0] if target in _IN_FOUR_BITS else target
    if asked not in NATIVE_TYPES:
        known = ", ".join(NATIVE_TYPES)
        raise ConfigError(f"a drafter's weights are one of {known}, not {asked!r}{suggest(asked, NATIVE_TYPES)}")
    return asked


def check_target_type(asked: str | None) -> None:
    """Raise `ConfigError` if a type is asked for, on a backend whose drafters have their target's."""
    if asked is not None:
        raise ConfigError(f"drafters have the type of their target on this backend: leave out weights={asked}")
