"""Sums and differences of counters: numbers in dataclasses, lists and mappings."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from functools import reduce
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


def total(parts: Sequence[T]) -> T:
    """Return the sum of several engines' counters or gauges."""
    return reduce(_add, parts)


def difference(new: T, old: T) -> T:
    """Return what counters gained since an earlier snapshot."""
    gained: T = _subtract(new, old)
    return gained


def _add(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return one | other | {key: _add(one[key], other[key]) for key in one.keys() & other.keys()}
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    if hasattr(one, "__dataclass_fields__"):
        return type(one)(**{f.name: _add(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)})
    return one + other


def _subtract(new: Any, old: Any) -> Any:
    if isinstance(new, dict):
        return {key: _subtract(value, old[key]) if key in old else deepcopy(value) for key, value in new.items()}
    if isinstance(new, list):
        return [value - (old[i] if i < len(old) else 0) for i, value in enumerate(new)]
    if hasattr(new, "__dataclass_fields__"):
        pairs = {f.name: _subtract(getattr(new, f.name), getattr(old, f.name)) for f in fields(new)}
        return type(new)(**pairs)
    return new - old
