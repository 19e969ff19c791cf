"""Devices of PyTorch's and their memory."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.backend.cuda.probe import findings
from paceline.backend.device import CPU
from paceline.core.errors import ConfigError
from paceline.core.system import available_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from numpy import generic
    from numpy.typing import NDArray

    from paceline.backend.device import Device

_USUAL_DEVICE = "cuda"
_USUAL_KV = "bf16"
_FP8_COMPUTE, _WIDE_COMPUTE = (8, 9), (9, 0)
_STAGED_BYTES = 1 << 16  # most host memory that CUDA copies aside at once; to send more it waits for earlier work
_NARROW = 128  # largest head dimension that older cards have registers for


def torch_device(device: Device | None) -> torch.device:
    """Return PyTorch's device. None: the first GPU. Raises `ConfigError` if it cannot be used."""
    on_cores = device is not None and device.torch_name is None
    name = CPU if on_cores else (device and device.torch_name) or _USUAL_DEVICE
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0]
    problem = next((f.text for f in findings(device) if not f.ok), problem)
    raise ConfigError(
        f"the cuda backend cannot use the device {name}: {problem}. Leave out --backend for this machine's cores; "
        f"--device {CPU} runs this backend on them, slowly"
    )


def check_card(device: torch.device, output_type: str, kv_type: str, head_dim: int) -> None:
    """Raise `ConfigError` for types and heads that a GPU's tensor cores do not take.

    output_type: type of the output matrix: fp8 beside weights of fp8 or int4.
    """
    if device.type in ("cpu", "meta"):  # meta tensors have no numbers; tools find a model's kernels with them
        return
    compute = torch.cuda.get_device_capability(device)
    if output_type == "fp8" and compute < _FP8_COMPUTE:
        raise ConfigError(
            "weights of fp8 or int4 need a GPU of compute capability 8.9 or newer; choose --weights bf16, or "
            "weights=bf16 of a drafter"
        )
    if kv_type == "fp8" and compute < _WIDE_COMPUTE:
        raise ConfigError(f"fp8 KV needs a GPU of compute capability 9.0 or newer; choose --kv {_USUAL_KV}")
    if head_dim > _NARROW and compute < _WIDE_COMPUTE:
        raise ConfigError(
            f"heads of {head_dim} need a GPU of compute capability 9.0 or newer; choose another model"
        )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on a device."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def sendable(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host's tensor as one that is sent without waiting for the device.

    The caller may change it once it is sent.
    """
    pins = device.type != "cpu" and tensor.is_cpu and tensor.nbytes > _STAGED_BYTES
    return tensor.pin_memory() if pins else tensor


def send(array: NDArray[generic], device: torch.device) -> torch.Tensor:
    """Send a host's array to a device without waiting for it."""
    return sendable(torch.from_numpy(array), device).to(device, non_blocking=True)


def free_bytes(device: Device | None) -> int:
    """Return the memory that is free on a device, see `BackendSpec.free_memory`."""
    where = torch_device(device)
    if where.type == "cpu":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(where)
    unused = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)  # PyTorch keeps what it freed
    return int(free + unused)


def return_memory() -> None:
    """Give freed memory that PyTorch keeps back to the driver, on all devices."""
    torch.cuda.empty_cache()


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros that take host memory only once written: `torch.zeros` touches all at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
    return flat.view(dtype).view(shape)


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Raise `ConfigError` where the device has no memory left for something."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise ConfigError(
            f"the device has no memory left for {what}: take a smaller type (--weights, --kv), fewer --kv-tokens "
            f"or another --device"
        ) from None
