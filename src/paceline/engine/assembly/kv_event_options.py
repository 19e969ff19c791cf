"""vLLM's `--kv-events-config`: where events of the prefix cache are published.

The keys are vLLM's, and `event_form`: vLLM sends each event as a map of named fields since 0.24, and sent an array
before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.core.flags import json_of

if TYPE_CHECKING:
    from argparse import _ArgumentGroup as ArgumentGroup
    from collections.abc import Mapping

FLAG = "--kv-events-config"
SHORT_FLAG = "--kv-events"
ENABLED, PUBLISHER = "enable_kv_cache_events", "publisher"
PUBLISHERS = ("zmq", "null")
MAP, ARRAY = FORMS = ("map", "array")
MAX_STEPS = 1 << 20
MAX_QUEUE = 1 << 24
MAX_CHARS = 256  # longest topic, longest endpoint
MAX_PORT = 65535
_ENDPOINT = re.compile(r"tcp://(?:[\w.*-]+|\[[0-9a-fA-F:]+\]):(\d{1,5})|ipc:///[^\0*]+")
_OURS = re.compile(r"[*]|::|^ipc:")  # found in endpoints at which we listen, by vLLM's rule
PLACES = "tcp://*:PORT listens on every address, tcp://HOST:PORT connects there, ipc:///PATH stays on this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """Destinations of an engine's events, by vLLM's keys. Checked when made; raises `ConfigError`."""

    endpoint: str
    replay_endpoint: str | None = None  # where subscribers ask for missed batches; None: nowhere
    topic: str = ""
    buffer_steps: int = 10_000  # most batches kept for replay
    hwm: int = 100_000  # most batches that wait for one subscriber; it misses further ones
    max_queue_size: int = 100_000  # most batches that wait to be sent
    event_form: str = MAP
    rank: int = 0  # index of the replica, vLLM's data-parallel rank

    def __post_init__(self) -> None:
        _check_place("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_place("replay_endpoint", self.replay_endpoint)
            if not binds(self.replay_endpoint):
                raise ConfigError(
                    f"{FLAG}: replay_endpoint is where we listen, such as tcp://*:5558 or ipc:///PATH"
                )
        if not isinstance(self.topic, str) or len(self.topic) > MAX_CHARS:
            raise ConfigError(f"{FLAG}: topic is a text of at most {MAX_CHARS} characters")
        for name, most in (("buffer_steps", MAX_STEPS), ("hwm", MAX_QUEUE), ("max_queue_size", MAX_QUEUE)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"{FLAG}: {name} is a whole number from 1 to {most}, not {value!r}")
        if self.event_form not in FORMS:
            raise ConfigError(f"{FLAG}: event_form is {MAP} (vLLM since 0.24) or {ARRAY} (before)")
        self.places()

    def places(self) -> list[str]:
        """Return the endpoints in use. Raises `ConfigError` if both are the same."""
        found = [place for place in (self.endpoint, self.replay_endpoint) if place]
        if len(set(found)) < len(found):
            raise ConfigError(f"{FLAG}: endpoint and replay_endpoint must differ, not both be {self.endpoint}")
        return found

    def for_replicas(self, count: int) -> list[KvEventsConfig]:
        """Return each replica's config: its rank, and ports that much higher. Raises `ConfigError`."""
        each = [
            replace(
                self,
                endpoint=_moved(self.endpoint, rank),
                replay_endpoint=self.replay_endpoint and _moved(self.replay_endpoint, rank),
                rank=rank,
            )
            for rank in range(count)
        ]
        places = [place for config in each for place in config.places()]
        if len(set(places)) < len(places):
            raise ConfigError(
                f"{FLAG}: each replica takes the next port, so {self.endpoint} and {self.replay_endpoint} must be "
                f"at least {count} ports apart for --replicas {count}"
            )
        return each


def binds(endpoint: str) -> bool:
    """Return whether we listen at an endpoint, by vLLM's rule, or connect to it."""
    return _OURS.search(endpoint) is not None


def _check_place(name: str, value: object) -> None:
    found = _ENDPOINT.fullmatch(value) if isinstance(value, str) and len(value) <= MAX_CHARS else None
    if found is None or not 1 <= int(found[1] or 1) <= MAX_PORT:
        raise ConfigError(f"{FLAG}: {name} {str(value)[:64]!r} is no place for events: {PLACES}")


def _moved(endpoint: str, rank: int) -> str:
    """Return a replica's endpoint, which vLLM would give to this rank."""
    if not endpoint.startswith("tcp"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    place, _, port = endpoint.rpartition(":")
    return f"{place}:{int(port) + rank}"


def events_config(given: str | Mapping[str, Any]) -> KvEventsConfig | None:
    """Return what JSON, a mapping or an endpoint asks for; None: no events. Raises `ConfigError`."""
    values = _parsed(given)
    enabled, publisher = values.pop(ENABLED, False), values.pop(PUBLISHER, None)
    if not isinstance(enabled, bool):
        raise ConfigError(f"{FLAG}: {ENABLED} is true or false")
    if publisher not in (None, *PUBLISHERS):
        raise ConfigError(f"{FLAG}: {PUBLISHER} is {' or '.join(PUBLISHERS)}, not {str(publisher)[:64]!r}")
    if "endpoint" not in values and enabled:
        raise ConfigError(f"{FLAG} needs an endpoint, as whoever reaches it reads all prompts' tokens: {PLACES}")
    config = KvEventsConfig(**values) if "endpoint" in values else None
    return config if enabled and publisher != "null" else None


def _parsed(given: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        return {ENABLED: True, "endpoint": given}
    known = {f.name for f in fields(KvEventsConfig)} - {"rank"} | {ENABLED, PUBLISHER}
    return json_of(FLAG, given, known, "a JSON object or an endpoint")


def add_events_arguments(group: ArgumentGroup) -> None:
    """Add the flag for commands that serve."""
    group.add_argument(
        FLAG,
        SHORT_FLAG,
        metavar="JSON|ENDPOINT",
        help="publish which pages the prefix cache holds, and their tokens, as vLLM does: its JSON, or an "
        "endpoint such as tcp://*:5557",
    )
