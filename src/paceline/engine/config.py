"""What an engine is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.control.objective import THROUGHPUT, Objective
from paceline.core.errors import ConfigError
from paceline.engine.backends import DEFAULT_BACKEND, BackendSpec, backend_spec
from paceline.engine.loops import AUTO, check_overlap
from paceline.engine.placement import Placement
from paceline.engine.scheduler import Limits
from paceline.model.device import SAME

DEFAULT_DRAFT = "auto"
MAX_ROWS = 1024
MAX_THREADS = 1024


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


def _bounded(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, not {value}")
