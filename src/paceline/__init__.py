"""Paceline: an inference engine in which speculative decoding is how the engine decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core import version

if TYPE_CHECKING:
    from paceline.core.params import SamplingParams
    from paceline.serve.async_llm import AsyncLLM
    from paceline.serve.llm import LLM

__version__ = version.VERSION
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "paceline.serve.llm",
    "AsyncLLM": "paceline.serve.async_llm",
    "SamplingParams": "paceline.core.params",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import paceline` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
