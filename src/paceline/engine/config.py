"""What an engine is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.errors import ConfigError, suggest
from paceline.engine.scheduler import Limits

DTYPES = ("float32", "float64", "bfloat16", "float16")
DEFAULT_DRAFT = "ngram:k=4"
MAX_ROWS = 1024
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything a user may choose about an engine. Checked when made; raises `ConfigError`."""

    model: str = "default"  # "default", a folder, a .gguf file or a Hugging Face id
    draft: str = DEFAULT_DRAFT  # "off" or NAME[:key=value,...]
    law: str = "coupled"
    backend: str = "reference"
    dtype: str = "float32"
    threads: int | None = None  # None: all cores
    kv_tokens: int | None = None  # KV slots in all; None: what the rows need, within free memory
    prefix_cache: bool = True
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}{suggest(self.dtype, DTYPES)}")
        _bounded("--max-rows", self.limits.num_rows, 1, MAX_ROWS)
        _bounded("--max-len", self.limits.max_len, 16, 1 << 24)
        _bounded("--prefill-tokens", self.limits.prefill_tokens, 1, 1 << 20)
        _bounded("--max-queued-tokens", self.limits.max_queued_tokens, 1, 1 << 32)
        _bounded("--threads", self.threads, 1, MAX_THREADS)
        _bounded("--kv-tokens", self.kv_tokens, 16, 1 << 32)


def _bounded(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, not {value}")
