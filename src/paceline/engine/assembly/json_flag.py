"""Flags of vLLM's whose value is a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_SHOWN = 64  # characters of an unknown key


def json_flag(flag: str, given: str | Mapping[str, Any], known: Collection[str], wanted: str) -> dict[str, Any]:
    """Return a flag's JSON object, or a mapping, if its keys are known.

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
