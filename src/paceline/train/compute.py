"""Which numbers training multiplies matrices in.

With bfloat16 the factors of a product are rounded to 8 bits of mantissa, and sums are float32. All else is float32
whatever is chosen: the weights that are kept, their moments, norms, softmax, residual stream and loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

AUTO = "auto"
COMPUTES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Choice:
    """What a run multiplies in, and why."""

    name: str  # a key of `COMPUTES`
    why: str  # for the user


def choose_compute(asked: str, device: torch.device) -> Choice:
    """Return what was asked for, or for "auto" bfloat16 where the device has instructions made for it."""
    if asked != AUTO:
        return Choice(asked, "as asked")
    fast, why = _HARDWARE.get(device.type, _unknown)()
    return Choice("bfloat16" if fast else "float32", why)


def products(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which PyTorch's own products are those of `name`; it casts each weight once."""
    dtype = COMPUTES[name]
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)


def _processor() -> tuple[bool, str]:
    # Without tiles (AMX) bfloat16 is not reliably faster than float32, and on some processors far slower.
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if probe is None:
        return False, "this PyTorch cannot tell whether the processor has AMX"
    has = bool(probe())
    return has, f"the processor has {'' if has else 'no '}AMX"


def _gpu() -> tuple[bool, str]:
    has = torch.cuda.is_bf16_supported(including_emulation=False)
    return has, f"the GPU has {'' if has else 'no '}bfloat16"


def _unknown() -> tuple[bool, str]:
    return False, "nothing is known of this device"


_HARDWARE = {"cpu": _processor, "cuda": _gpu}
