"""Single values of a head's config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.errors import BadModelFile

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TAPS = 16


def integer(values: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number of 31 bits. Raises `BadModelFile`."""
    value = values.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise BadModelFile(f"the head's {key} = {str(value)[:80]} must be a whole number")
    return value


def flag(values: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Return a switch. Raises `BadModelFile`."""
    value = values.get(key)
    value = default if value is None else value
    if type(value) is not bool:
        raise BadModelFile(f"the head's {key} = {str(value)[:80]} must be true or false")
    return value


def layer_list(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return a list of the target's layers, empty where there is none. Raises `BadModelFile`."""
    given = values.get(key)
    if given is None:
        return ()
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_TAPS or not all(type(i) is int for i in given):
        raise BadModelFile(f"{key} = {str(given)[:80]} must be a list of layers")
    return tuple(given)
