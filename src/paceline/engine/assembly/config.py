"""Options of an engine."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import TYPE_CHECKING

from paceline.backend.device import SAME
from paceline.backend.registry import AUTO as AUTO_BACKEND
from paceline.backend.registry import BackendSpec, backend_spec, choose_backend
from paceline.control.row_by_row import THROUGHPUT, Objective
from paceline.core.errors import ConfigError, suggest
from paceline.core.params import MAX_CHANGE_BUDGET, TYPICAL, shown
from paceline.core.sampling_defaults import KINDS, MODEL
from paceline.core.system import core_quota, usable_cores
from paceline.engine.assembly.kv_event_options import KvEventsConfig
from paceline.engine.assembly.placement import Placement
from paceline.engine.request_table import Limits

if TYPE_CHECKING:
    from paceline.backend.device import DeviceDefaults

DEFAULT_DRAFT = "auto"
AUTO, ON, OFF = OVERLAPS = ("auto", "on", "off")  # values of --overlap
LAW_BUDGET = 0.02
MAX_ROWS = 1024
PACKED_CACHE_BYTES = 64 << 30
MAX_THREADS = 1024
MAX_RANKS = 8
MAX_SHARERS = 1024
_KINDS = {
    "str": (str,),
    "str | None": (str, NoneType),
    "bool": (bool,),
    "Limits": (Limits,),
    "KvEventsConfig | None": (KvEventsConfig, NoneType),
}
_FILES = frozenset({"model", "profile", "trace", "kv_disk"})  # options that may be given as a path object


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options that a user may set for an engine. Checked when made; raises `ConfigError`."""

    model: str = "default"  # "default", a folder, a .gguf file, a Hugging Face id or a shape
    draft: str = DEFAULT_DRAFT  # "auto[:SPEC+SPEC]", "off" or NAME[:key=value,...]
    law: str = "coupled"
    law_budget: float | None = None  # of the law `typical`: largest share of changed tokens; None: LAW_BUDGET
    backend: str = AUTO_BACKEND
    device: str | None = None  # the target's device, on backends with several; None: the backend's default
    numerics: str | None = None  # `exact` or `fast`; None: the backend's default
    weights: str | None = None  # type of the weights; None: the backend's default
    kv: str | None = None  # type of the KV cache; None or "auto": the backend's default, or a smaller one
    threads: int | None = None  # threads that compute a pass; None: as many as cores or the CPU quota allow
    kv_tokens: int | None = None  # KV slots in total; None: what the rows need, within memory and a bound
    kv_budget: int | None = None  # bytes of KV where pages may lose window parts; None: by free memory
    sharers: int = 1  # engines that share the free memory: each takes 1 / sharers of the usual share for its KV
    prefix_cache: bool = True
    packed_cache_bytes: int = PACKED_CACHE_BYTES  # most bytes of packed weights kept for later starts; 0: none
    kv_disk: str | None = None  # folder for pages of the prefix cache; None: they are in memory only
    kv_disk_bytes: int = 16 << 30  # most bytes of that folder
    kv_events: KvEventsConfig | None = None  # where an engine's process publishes events of the prefix cache
    profile: str | None = None  # file of measured costs for `--draft auto`; None: those of this machine
    overlap: str = AUTO  # one of OVERLAPS: draft one half of the rows while the other is scored
    draft_device: str = SAME  # where drafters run; see `Placement.parse`
    draft_process: bool = False  # every drafter gets a process of its own
    tensor_parallel: int = 1  # processes that share the target's layers, each on a device or cores of its own
    draft_tensor_parallel: int = 1  # the same for drafters with layers of their own
    objective: str = THROUGHPUT  # what `--draft auto` aims at: throughput, or latency:MS
    keep_learnt: bool = True  # keep what `--draft auto` learns, for the next engine like this one
    trace: str | None = None  # file to which `--draft auto` writes its inputs, choices and outcomes
    sampling_defaults: str = MODEL  # values that requests leave out: the model's or usual ones, or neutral ones
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in _FILES:
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        _check_kinds(self)
        _ = self.kv_type, self.numerics_mode, Objective.parse(self.objective), self.placement
        _bounded("--tensor-parallel", self.tensor_parallel, 1, MAX_RANKS)
        _bounded("--draft-tensor-parallel", self.draft_tensor_parallel, 1, MAX_RANKS)
        self.backend_spec.check_ranks(self.tensor_parallel, self.draft_tensor_parallel)
        self._check_law_budget()
        if self.overlap not in OVERLAPS:
            known = f"{', '.join(OVERLAPS)}{suggest(self.overlap, OVERLAPS)}"
            raise ConfigError(f"--overlap {self.overlap}: it is one of {known}")
        if self.sampling_defaults not in KINDS:
            raise ConfigError(f"--sampling-defaults is {' or '.join(KINDS)}, not {self.sampling_defaults!r}")
        _bounded("--max-rows", self.limits.num_rows, 1, MAX_ROWS)
        _bounded("--max-len", self.limits.max_len, 16, 1 << 24)
        _bounded("--prefill-tokens", self.limits.prefill_tokens, 1, 1 << 20)
        _bounded("--max-queued-tokens", self.limits.max_queued_tokens, 1, 1 << 32)
        _bounded("--threads", self.threads, 1, MAX_THREADS)
        _bounded("--kv-tokens", self.kv_tokens, 16, 1 << 32)
        _bounded("kv_budget", self.kv_budget or 0, 0, 1 << 56)
        _bounded("--replicas", self.sharers, 1, MAX_SHARERS)
        _bounded("--packed-cache-bytes", self.packed_cache_bytes, 0, 1 << 50)
        _bounded("--kv-disk-bytes", self.kv_disk_bytes, 1 << 20, 1 << 50)
        if self.kv_disk is not None and not self.prefix_cache:
            raise ConfigError("--kv-disk keeps pages of the prefix cache: leave out --no-prefix-cache")
        if self.kv_events is not None and not self.prefix_cache:
            raise ConfigError("--kv-events-config tells of the prefix cache: leave out --no-prefix-cache")

    def _check_law_budget(self) -> None:
        budget = self.law_budget
        if budget is None:
            return
        if self.law != TYPICAL:
            raise ConfigError(f"--law-budget goes with --law {TYPICAL}: under {self.law} no token is changed")
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= MAX_CHANGE_BUDGET:
            raise ConfigError(
                f"--law-budget is a share of the tokens from 0 to {MAX_CHANGE_BUDGET}, not {shown(budget)}"
            )

    @property
    def change_budget(self) -> float | None:
        """Largest share of changed tokens of requests that state none; None under another law."""
        if self.law != TYPICAL:
            return None
        return LAW_BUDGET if self.law_budget is None else self.law_budget

    @property
    def full_law(self) -> str:
        """The law and its budget, as responses tell them."""
        return self.law if self.change_budget is None else f"{self.law} {self.change_budget:g}"

    @property
    def about_law(self) -> str:
        """Meaning of the law for texts."""
        if self.change_budget is not None:
            return f"changes up to {self.change_budget:.2%} of an answer's tokens, for speed; --law-budget sets it"
        return (
            "same seed, same text, with drafts or without" if self.law == "coupled" else "same distribution only"
        )

    @property
    def for_auto(self) -> str | None:
        """The first flag given that only `--draft auto` reads; None if there is none."""
        given = {
            "--profile": self.profile is not None,
            "--objective latency": Objective.parse(self.objective) != Objective(),
            "--trace": self.trace is not None,
        }
        return next((flag for flag, used in given.items() if used), None)

    @property
    def num_threads(self) -> int:
        """Threads that compute a pass of the target."""
        return self.threads or self.quota_threads or self._num_cores

    @property
    def _num_cores(self) -> int:
        target = self.placement.target
        return len(usable_cores() if target is None or not target.cores else target.cores)

    @property
    def quota_threads(self) -> int | None:
        """Threads that the control group's CPU quota allows; None: as many as cores, or more.

        More threads would use up the quota of a period early, and all would wait for the next period.
        """
        target, ranks = self.placement.target, self.tensor_parallel
        most = math.ceil(core_quota() / (self.sharers * ranks))
        return most if (target is None or target.is_host) and most < self._num_cores // ranks else None

    def within_quota(self) -> EngineConfig:
        """Return a config with as many threads as the control group's CPU quota allows."""
        return replace(self, threads=self.threads or self.quota_threads)

    @property
    def backend_spec(self) -> BackendSpec:
        """The backend's entry in the registry."""
        return backend_spec(self.backend)

    @property
    def own_model_spec(self) -> BackendSpec:
        """Backend of a draft model that stands alone; on cores it may be another one."""
        spec, draft = self.backend_spec, self.placement.draft
        on_cores = draft is not None and draft.is_host and spec.cores_backend is not None
        return backend_spec(spec.cores_backend) if on_cores and spec.cores_backend else spec

    @property
    def why_backend(self) -> str:
        """Reason for the backend."""
        return choose_backend(self.backend)[1]

    @property
    def numerics_mode(self) -> str | None:
        """Numerics that will be used; None where the backend has one way only."""
        return self.backend_spec.numerics_of(self.numerics)

    @property
    def placement(self) -> Placement:
        """Devices of target and drafters."""
        return Placement.parse(self.draft_device, self.backend_spec.device(self.device))

    @property
    def device_defaults(self) -> DeviceDefaults | None:
        """Usual limits on the target's device; None: those of a host."""
        return self.backend_spec.defaults_on(self.placement.target)

    @property
    def drops_windows(self) -> bool:
        """True if the target's store can drop what sliding layers hold of a page."""
        target = self.placement.target
        on_host = target is None or target.is_host
        takes_back = sys.platform == "linux"  # other systems do not take back the memory of dropped pages
        return takes_back and self.backend_spec.drops_windows and on_host and self.tensor_parallel == 1

    @property
    def usual_limits(self) -> Limits:
        """Limits of an engine whose user sets none."""
        usual = self.device_defaults
        return Limits() if usual is None else Limits(usual.num_rows, usual.max_len, usual.prefill_tokens)

    def free_bytes(self) -> int:
        """Return the memory that is free where the target's KV lies."""
        return self.backend_spec.free_bytes(self.placement.target)

    @property
    def weight_type(self) -> str:
        """Type of the weights that will be used."""
        return self.backend_spec.weight_type(self.weights)

    @property
    def kv_type(self) -> str:
        """Type of the KV cache that will be used."""
        return self.backend_spec.kv_type(self.kv, self.weight_type)


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the start-up banner: what was chosen, and why."""

    what: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Settled:
    """One engine's choices by free memory, for others that must choose the same."""

    weights: str
    kv: str
    kv_tokens: int
    kv_budget: int | None = None

    def pin(self, config: EngineConfig) -> EngineConfig:
        """Return a config in which these choices are already made."""
        tokens, budget = self.kv_tokens, self.kv_budget
        return replace(config, weights=self.weights, kv=self.kv, kv_tokens=tokens, kv_budget=budget)


def _check_kinds(config: EngineConfig) -> None:
    """Raise `ConfigError` for values of the wrong type, but for integers, which `_bounded` checks."""
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
