"""Newer weights: version and place. Parts of memory that can be given back."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import RequestError

WEIGHTS, KV_CACHE = TAGS = ("weights", "kv_cache")  # parts of the memory that can be given back
FIRST_VERSION = "default"  # version of the weights that an engine begins with, named as in SGLang
MAX_VERSION_CHARS = 128
ASLEEP = "the engine has given back {}; resume its memory first"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Place of a model's newer weights."""

    model: str | None = None  # folder or .gguf file of a whole model; None: the one that was loaded first
    tensors: str | None = None  # folder of safetensors files, whose tensors replace that model's by name
    whole: bool = False  # refuse a folder that lacks one of the model's tensors


def check_version(version: object) -> str:
    """Return a version. Raises `RequestError` for one that answers and page hashes cannot carry."""
    if not isinstance(version, str) or not 0 < len(version) <= MAX_VERSION_CHARS or "\0" in version:
        raise RequestError(
            f"weight_version must be a text of 1 to {MAX_VERSION_CHARS} characters", "weight_version"
        )
    return version
