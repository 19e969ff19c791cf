"""Variants of kernels that some work launches, found without a device.

Its tensors have shapes and no numbers.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from paceline.backend.cuda import (
    attention,
    choice,
    judge,
    late_hints,
    late_lookup,
    output_matrix,
    products,
    row_launches,
    rowwise,
    tiles,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backend.cuda.kernel_launch import Variant

META = torch.device("meta")
H100_PROCESSORS = 132
LAUNCHING = (
    products,
    tiles,
    rowwise,
    attention,
    choice,
    judge,
    row_launches,
    late_hints,
    late_lookup,
    output_matrix,
)  # imported before they are watched


@contextmanager
def launches(num_processors: int = H100_PROCESSORS) -> Iterator[dict[str, Variant]]:
    """Note the variants that would be launched; launch none. num_processors: of the device meant."""
    found: dict[str, Variant] = {}

    def note(variant: Variant, grid: tuple[int, ...], *_: Any) -> None:
        if all(grid):
            found[_key(variant)] = variant

    replaced: dict[str, Any] = {
        "launch": note,
        "uses_kernels": lambda tensor: tensor.dtype != torch.float64,
        "num_processors": lambda _: num_processors,
    }
    watched = [module for name, module in sys.modules.items() if name.startswith("paceline.backend.cuda.")]
    with ExitStack() as stack:
        for module in watched:
            for name, value in replaced.items():
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, value))
        yield found


def _key(variant: Variant) -> str:
    """Return all that its code depends on."""
    parts = variant.kernel, dict(variant.arguments), dict(variant.constants), sorted(variant.aligned)
    return repr((*parts, variant.options()))
