"""Options of a front behind Ray's proxy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.serve.api.keys import KeyRing
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.operation import OperationOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

FLEET = ("route", "resume", "hedge", "tail")  # fields of `ReplicaOptions` that a front takes
UNPUBLISHED = "engines may move between machines, and so would their endpoints"  # why there are no KV events
NAMES = ("api_key", "api_key_file", "insecure", "rl", "served_model_name", "resume_wait_s", *FLEET)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """Options of a front, which Ray sends to its process."""

    api_key: str | None = None
    served_names: tuple[str, ...] = ()
    fleet: ReplicaOptions = field(default_factory=ReplicaOptions)
    operation: OperationOptions = field(default_factory=OperationOptions)

    def keys(self) -> KeyRing:
        """Return the keys, one of which requests must carry. Raises `ConfigError` for a bad file."""
        return KeyRing(self.api_key, self.operation.api_key_file)


def of_arguments(given: Mapping[str, Any]) -> FrontOptions:
    """Return options by the names in `NAMES`.

    Raises `ConfigError` if there is neither a key nor `insecure`.

    Ray's proxy listens where it was told to, so that the front cannot know who may connect.
    """
    key, file = given.get("api_key"), given.get("api_key_file")
    if not key and not file and not given.get("insecure"):
        raise ConfigError(
            "say api_key=KEY or api_key_file=FILE, or insecure=true if only trusted programs reach Ray's proxy"
        )
    if given.get("rl") and not key and not file:
        raise ConfigError("rl=true lets clients renew the weights: it goes with api_key, not with insecure")
    name = given.get("served_model_name")
    fleet: dict[str, Any] = {name: _word(given[name]) for name in FLEET if name in given}
    if "resume_wait_s" in given:
        fleet["resume_wait_s"] = _seconds(given["resume_wait_s"])
    options = FrontOptions(
        api_key=str(key) if key else None,
        served_names=(str(name),) if name else (),
        fleet=ReplicaOptions(**fleet),
        operation=OperationOptions(rl=bool(given.get("rl")), api_key_file=Path(file) if file else None),
    )
    options.keys()
    if options.operation.rl:
        options.fleet.check_renewal()
    return options


def _word(value: Any) -> str:
    """Return a value as a word; YAML reads `on` and `off` as truth values."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"resume_wait_s is a number of seconds, not {value!r}")
    return value
