"""Number type of matrix products in training.

With bfloat16 the factors of a linear map are rounded to 8 bits of mantissa, and products are summed in float32.
The same holds for `torch.matmul`, which the attention of block heads uses. Everything else is always float32:
weights, moments, norms, other attention, softmax, the residual stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.autograd.function import FunctionCtx

AUTO = "auto"
COMPUTES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Rows are padded to a multiple of this number before a product. The CPU library generates code for each new shape,
# which costs more than the product, and batches differ in their number of rows.
ROW_MULTIPLE = 128


def choose_compute(requested: str, device: torch.device) -> tuple[str, str]:
    """Return a key of `COMPUTES` and the reason; "auto" gives bfloat16 where it is fast."""
    if requested != AUTO:
        return requested, "as asked"
    fast, why = _HARDWARE.get(device.type, _unknown)()
    return "bfloat16" if fast else "float32", why


def _processor() -> tuple[bool, str]:
    # Without special instructions bfloat16 is no faster than float32, and on some processors far slower.
    probes = {name: getattr(torch.cpu, probe, None) for name, probe in _INSTRUCTIONS.items()}
    if None in probes.values():
        return False, "this PyTorch cannot tell what instructions the processor has"
    found = next((name for name, probe in probes.items() if probe and probe()), None)
    return found is not None, f"the processor has {found or 'no instructions for bfloat16'}"


def _gpu() -> tuple[bool, str]:
    has = torch.cuda.is_bf16_supported(including_emulation=False)
    return has, f"the GPU has {'' if has else 'no '}bfloat16"


def _unknown() -> tuple[bool, str]:
    return False, "nothing is known of this device"


_INSTRUCTIONS = {"AMX": "_is_amx_tile_supported", "AVX-512 BF16": "_is_avx512_bf16_supported"}
_HARDWARE = {"cpu": _processor, "cuda": _gpu}


def product_precision(name: str) -> AbstractContextManager[object]:
    """Return a context in which linear maps multiply in a type of `COMPUTES`.

    Use one per step: it rounds each weight once, so it must not outlive a change of the weights.
    """
    return nullcontext() if name == "float32" else _RoundedLinear(COMPUTES[name])


class _RoundedLinear(TorchFunctionMode):
    """Replacement of `functional.linear` and `torch.matmul` inside the context."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._rounded: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is torch.matmul:
            return func(*(factor.to(self._dtype) for factor in args)).to(args[0].dtype)
        return func(*args, **(kwargs or {}))

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if id(weight) not in self._rounded:
            self._rounded[id(weight)] = weight.detach().to(self._dtype)
        made = cast("torch.Tensor", _RoundedProduct.apply(x, weight, self._rounded[id(weight)]))  # type: ignore[no-untyped-call]
        return made if bias is None else made + bias


class _RoundedProduct(torch.autograd.Function):
    """x @ weight.T with rounded factors, also backward; results keep the types given."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, _weight: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        given = padded(x, rounded.dtype)
        ctx.save_for_backward(given, rounded)
        return (given @ rounded.T)[: len(x)].to(x.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> Any:
        given, rounded = cast("Any", ctx).saved_tensors
        of_given, of_weight, _ = cast("Any", ctx).needs_input_grad
        (grad,) = grads
        slope = padded(grad, rounded.dtype)
        return (
            (slope @ rounded)[: len(grad)].to(grad.dtype) if of_given else None,
            (slope.T @ given).to(grad.dtype) if of_weight else None,
            None,
        )


def round_up(num: int) -> int:
    """Return the next multiple of `ROW_MULTIPLE`."""
    return -(-num // ROW_MULTIPLE) * ROW_MULTIPLE


def padded(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [n, width] in a type, zero-padded to a multiple of `ROW_MULTIPLE` rows."""
    made = rows.new_empty(round_up(len(rows)), rows.shape[1], dtype=dtype)
    made[: len(rows)] = rows
    made[len(rows) :] = 0
    return made
