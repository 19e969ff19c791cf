"""Helpers of tests that run in Triton's interpreter."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.backend.cuda import products, rowwise

if TYPE_CHECKING:
    from collections.abc import Iterator


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random numbers, followed in memory by NaN that no kernel may read."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    room = torch.full((shape[0] + 3, *shape[1:]), torch.nan, dtype=dtype)
    room[: shape[0]] = torch.randn(shape, generator=generator).to(dtype)
    return room[: shape[0]]


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill tensors that are allocated for outputs with what no kernel writes."""
    allocate = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def poisoned(name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = allocate[name](*args, **kwargs)
        if tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(torch.nan if tensor.is_floating_point() else -77)
        return tensor

    for name in allocate:
        monkeypatch.setattr(torch, name, lambda *a, name=name, **k: poisoned(name, *a, **k))


@contextmanager
def plain() -> Iterator[None]:
    """Run PyTorch's operations instead of kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (products, rowwise):
            patch.setattr(module, "uses_kernels", lambda tensor: False)
        yield


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare as bits, NaN and signs of 0 included."""
    assert a.dtype == b.dtype
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
