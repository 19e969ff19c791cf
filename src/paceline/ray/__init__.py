"""Paceline on Ray: `serve run paceline.ray:app model=default replicas=2`. The only package that imports ray."""

from __future__ import annotations

from importlib import import_module

# Public names by module, imported when they are asked for: an engine's actor needs none of them.
_HOMES = {
    "Generate": "paceline.ray.data_set",
    "Headroom": "paceline.ray.scaling_policy",
    "app": "paceline.ray.application",
    "start_local_ray": "paceline.ray.local_ray",
}

__all__ = ["Generate", "Headroom", "app", "start_local_ray"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
