"""What an engine is made from."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from types import NoneType

from paceline.backend.device import SAME
from paceline.backend.registry import DEFAULT_BACKEND, BackendSpec, backend_spec
from paceline.control.latency_target import THROUGHPUT, Objective
from paceline.core.errors import ConfigError
from paceline.engine.assembly.loop_choice import AUTO, check_overlap
from paceline.engine.assembly.placement import Placement
from paceline.engine.scheduler import Limits

DEFAULT_DRAFT = "auto"
MAX_ROWS = 1024
MAX_THREADS = 1024
_KINDS = {"str": (str,), "str | None": (str, NoneType), "bool": (bool,), "Limits": (Limits,)}
_FILES = frozenset({"model", "profile", "trace"})  # a path will do, too


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything a user may choose about an engine. Checked when made; raises `ConfigError`."""

    model: str = "default"  # "default", a folder, a .gguf file or a Hugging Face id
    draft: str = DEFAULT_DRAFT  # "auto[:SPEC+SPEC]", "off" or NAME[:key=value,...]
    law: str = "coupled"
    backend: str = DEFAULT_BACKEND
    weights: str | None = None  # type of the weights; None: the backend's default
    kv: str | None = None  # type of the KV cache; None: the backend's default
    threads: int | None = None  # None: all cores
    kv_tokens: int | None = None  # KV slots in all; None: what the rows need, within free memory
    prefix_cache: bool = True
    profile: str | None = None  # file of measured costs for `--draft auto`; None: those of this machine
    overlap: str = AUTO  # whether two groups of rows take turns; see `loops.py`
    draft_device: str = SAME  # where drafters run; see `Device.parse`
    objective: str = THROUGHPUT  # or latency:MS, which `--draft auto` keeps to
    trace: str | None = None  # file to which `--draft auto` writes what it knew, chose and got
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in _FILES:
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        _check_kinds(self)
        _ = self.kv_type, Objective.parse(self.objective), self.placement
        check_overlap(self.overlap)
        _bounded("--max-rows", self.limits.num_rows, 1, MAX_ROWS)
        _bounded("--max-len", self.limits.max_len, 16, 1 << 24)
        _bounded("--prefill-tokens", self.limits.prefill_tokens, 1, 1 << 20)
        _bounded("--max-queued-tokens", self.limits.max_queued_tokens, 1, 1 << 32)
        _bounded("--threads", self.threads, 1, MAX_THREADS)
        _bounded("--kv-tokens", self.kv_tokens, 16, 1 << 32)

    @property
    def for_auto(self) -> str | None:
        """The first flag given that means nothing without `--draft auto`, None if there is none."""
        given = {
            "--profile": self.profile is not None,
            "--objective latency": Objective.parse(self.objective) != Objective(),
            "--trace": self.trace is not None,
        }
        return next((flag for flag, used in given.items() if used), None)

    @property
    def backend_spec(self) -> BackendSpec:
        """What the backend offers."""
        return backend_spec(self.backend)

    @property
    def placement(self) -> Placement:
        """Where target and drafters run."""
        return Placement.parse(self.draft_device)

    @property
    def weight_type(self) -> str:
        """Type of the weights that will be used."""
        return self.backend_spec.weight_type(self.weights)

    @property
    def kv_type(self) -> str:
        """Type of the KV cache that will be used."""
        return self.backend_spec.kv_type(self.kv, self.weight_type)


def _check_kinds(config: EngineConfig) -> None:
    """Raise `ConfigError` for values of the wrong type, which Python can give; `_bounded` sees to integers."""
    for option in fields(config):
        value, kinds = getattr(config, option.name), _KINDS.get(str(option.type))
        if kinds and not isinstance(value, kinds):
            wanted = "a string" if kinds[0] is str else f"a {kinds[0].__name__}"
            raise ConfigError(f"--{option.name.replace('_', '-')} must be {wanted}, not {_kind(value)}")


def _bounded(name: str, value: object, low: int, high: int) -> None:
    if value is None and name in ("--threads", "--kv-tokens"):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, not {_kind(value)}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, not {value}")


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
