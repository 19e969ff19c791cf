"""Helpers of tests that run in Triton's interpreter."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import triton.language as tl

from paceline.backend.cuda import products, rowwise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


NARROW = {"fp8e4nv": (products.FP8, torch.uint8), "bf16": (torch.bfloat16, torch.uint16)}


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


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what Triton 3.9.0's interpreter does wrong and no GPU does.

    Rounding to fp8 and bfloat16 loses the carry of a mantissa into the exponent, NaN in fp8 is read as 480, a dot
    multiplies the bits of bfloat16, and on some processors its sums depend on the shape of the tile.
    """
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(array: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name == "fp8e4nv":
            wide = torch.from_numpy(array.view("uint8")).view(products.FP8).float().numpy()
            return wide if target.name == "fp32" else convert(wide, tl.float32, target, rounding)
        if target.name not in NARROW:
            return convert(array, source, target, rounding)
        dtype, bits = NARROW[target.name]
        wide = array if source.name == "fp32" else convert(array, source, tl.float32, rounding)
        return torch.from_numpy(wide.view("float32")).to(dtype).view(bits).numpy()

    def multiplied(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        wide = [
            converted(x.data, x.dtype, tl.float32, None).view("float32") if x.dtype.name in NARROW else x.data
            for x in (a, b)
        ]
        return interpreter.TensorHandle(_in_order(*wide, d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)


def _in_order(a: NDArray[Any], b: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Return a matrix product whose sums are taken in the order of the inner index, whatever the shapes."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for i in range(a.shape[-1]):
        total += a[..., :, i, None].astype(dtype) * b[..., i, None, :].astype(dtype)
    return total


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
