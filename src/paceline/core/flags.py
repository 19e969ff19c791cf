"""Flags whose defaults are the fields of a dataclass, and the dataclass back from them."""

from __future__ import annotations

import json
from argparse import BooleanOptionalAction
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from argparse import _ArgumentGroup as ArgumentGroup
    from collections.abc import Callable, Collection

OptionsT = TypeVar("OptionsT")
NumberT = TypeVar("NumberT", int, float)
MAX_SHOWN = 64  # characters of an unknown key


def add_flags(group: ArgumentParser | ArgumentGroup, defaults: object, flags: Mapping[str, str]) -> None:
    """Add a flag for each named field of `defaults`, of its default's type.

    flags: field -> metavar, a space and the help; for a switch, the help alone.
    """
    for name, text in flags.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        if isinstance(default, bool):
            group.add_argument(flag, action=BooleanOptionalAction, default=default, help=text)
        else:
            kind = type(default) if isinstance(default, int | float) else str
            metavar, _, about = text.partition(" ")
            group.add_argument(flag, type=kind, metavar=metavar, default=default, help=about)


def of_flags(kind: type[OptionsT], args: Namespace, **others: Any) -> OptionsT:
    """Return a dataclass of the flags named like its fields, `others`, and its defaults."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(args).items() if name in names} | others)


def numbers_of(flag: str, text: str, low: int, high: int) -> tuple[int, ...]:
    """Return the numbers of a flag's list, each once. Raises `ConfigError`."""
    found = tuple(dict.fromkeys(listed(text, int)))
    if not found or not all(low <= number <= high for number in found):
        raise ConfigError(f"{flag} must be numbers between {low} and {high} such as 1,4,16, not {text!r}")
    return found


def listed(text: str, kind: Callable[[str], NumberT]) -> tuple[NumberT, ...]:
    """Return the numbers of a list such as 1,4,16; none if one is malformed."""
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        return ()


def json_of(flag: str, given: str | Mapping[str, Any], known: Collection[str], wanted: str) -> dict[str, Any]:
    """Return a flag's JSON object, or a mapping in its place, its keys checked.

    wanted: what the flag takes, for the error. Raises `ConfigError`.
    """
    try:
        values = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} is no JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{flag} must be {wanted}")
    for key in values:
        if key not in known:
            raise ConfigError(f"{flag} has no key {str(key)[:MAX_SHOWN]!r}{suggest(str(key), known)}")
    return dict(values)
