"""Probe of the `cuda` backend, without importing torch: GPU, driver, PyTorch, Triton, and their versions."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backend.device import Finding
from paceline.core.system import version_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.backend.device import Device

INSTALL = "pip install 'paceline[cuda]'"
LEAST_TRITON = (3, 4)  # the first with kernels that begin early
LEAST_COMPUTE = (8, 0)  # Ampere: bf16 products and asynchronous copies
_DEVICE_FILES = ("nvidia[0-9]*", "dxg")  # under /dev; the second is WSL's
_LIBRARY = "libcuda.so.1"  # the driver brings it
_MAX_NAME = 256
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver describes it."""

    name: str
    memory_bytes: int
    compute: tuple[int, int]  # compute capability


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver and its GPUs."""

    cuda: tuple[int, int]  # newest CUDA version that it runs
    gpus: tuple[Gpu, ...]  # GPUs that this process may use
    problem: str | None = None  # what is wrong with the driver


def findings(device: Device | None) -> Sequence[Finding]:
    """Return what was found for a device, None for the first GPU. See `BackendSpec.probe`."""
    on_host = device is not None and device.is_host
    found = [] if on_host else list(_gpu(0 if device is None else _index(device)))
    if all(f.ok for f in found):
        found += _packages(on_host)
    return found


def _index(device: Device) -> int:
    with suppress(ValueError):  # for a wrong name PyTorch raises a clear error later
        return int((device.torch_name or "").partition(":")[2])
    return 0


def _gpu(index: int) -> Iterator[Finding]:
    driver = read_driver()
    if driver is None:
        yield Finding("GPU", False, "there is no NVIDIA GPU here")
        return
    if driver.problem is not None:
        yield Finding("GPU driver", False, driver.problem)
        return
    yield Finding("GPU driver", True, f"runs CUDA {_dotted(driver.cuda)}")
    if index >= len(driver.gpus):
        count = len(driver.gpus)
        text = f"there is no GPU {index}: this process may use {count or 'none'}"
        yield Finding("GPU", False, f"{text}; CUDA_VISIBLE_DEVICES may hide others")
        return
    gpu = driver.gpus[index]
    text = f"{gpu.name}, {gpu.memory_bytes / _GIB:.1f} GiB, compute capability {_dotted(gpu.compute)}"
    if gpu.compute < LEAST_COMPUTE:
        yield Finding("GPU", False, f"{text} is too old: the kernels need {_dotted(LEAST_COMPUTE)}")
        return
    yield Finding("GPU", True, text)


def _packages(on_host: bool) -> Iterator[Finding]:
    torch_version = version_of("torch")
    if torch_version is None:
        yield Finding("PyTorch", False, f"PyTorch is not installed: {INSTALL}")
        return
    if on_host:
        yield Finding("PyTorch", True, torch_version)
        return
    built, driver = torch_cuda(), read_driver()
    if built is None:
        text = f"PyTorch {torch_version} was built without CUDA: install its build for CUDA"
        yield Finding("PyTorch", False, text)
    elif driver is not None and built[0] > driver.cuda[0]:
        text = f"PyTorch {torch_version} wants CUDA {_dotted(built)}, the driver runs {_dotted(driver.cuda)}"
        yield Finding("PyTorch", False, f"{text}: install a newer driver or an older PyTorch")
    else:
        yield Finding("PyTorch", True, f"{torch_version} for CUDA {_dotted(built)}")
    yield _triton(version_of("triton"))


def _triton(found: str | None) -> Finding:
    if found is None:
        return Finding("Triton", False, f"Triton is not installed: {INSTALL}")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < LEAST_TRITON:
        return Finding("Triton", False, f"Triton {found} is older than {_dotted(LEAST_TRITON)}: {INSTALL}")
    return Finding("Triton", True, found)


def torch_cuda() -> tuple[int, int] | None:
    """Return the CUDA version that PyTorch was built for, by its files; None without one."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        with suppress(OSError):
            text = (Path(folder) / "version.py").read_text(encoding="utf-8", errors="replace")
            match = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d{1,4})\.(\d{1,4})", text, re.MULTILINE)
            return (int(match[1]), int(match[2])) if match else None
    return None


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


# The driver's own library: it answers without a context, so no memory of a GPU is taken -------------


@lru_cache(maxsize=1)
def read_driver(devices: Path = Path("/dev")) -> Driver | None:
    """Return the driver and its GPUs; None where the system has no such device."""
    if not any(any(devices.glob(pattern)) for pattern in _DEVICE_FILES):
        return None
    try:
        library = ctypes.CDLL(_LIBRARY)
        return _ask(library)
    except (OSError, AttributeError):
        return Driver((0, 0), (), f"there is a GPU but no {_LIBRARY}: install its driver")


def _ask(library: Any) -> Driver:
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    cuda = number.value // 1000, number.value % 1000 // 10
    status = library.cuInit(0)
    if status == _NO_DEVICE:
        return Driver(cuda, ())
    if status:
        return Driver(cuda, (), f"the GPU's driver does not start: error {status}; does nvidia-smi work?")
    library.cuDeviceGetCount(ctypes.byref(number))
    return Driver(cuda, tuple(_describe(library, index) for index in range(number.value)))


def _describe(library: Any, index: int) -> Gpu:
    device, number = ctypes.c_int(), ctypes.c_int()
    name, memory_bytes = ctypes.create_string_buffer(_MAX_NAME), ctypes.c_size_t()
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, _MAX_NAME, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory_bytes), device)
    compute = []
    for attribute in (_MAJOR, _MINOR):
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        compute.append(number.value)
    return Gpu(name.value.decode(errors="replace"), memory_bytes.value, (compute[0], compute[1]))
