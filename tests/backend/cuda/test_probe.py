"""The probe says what is missing and what to do, and never imports torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.backend import registry
from paceline.backend.cuda import device_memory, probe
from paceline.backend.cuda.probe import Driver, Gpu
from paceline.backend.device import Device
from paceline.backend.registry import BACKENDS
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.device import Finding

H100 = Gpu("NVIDIA H100", 80 << 30, (9, 0))


def found(
    monkeypatch: pytest.MonkeyPatch,
    driver: Driver | None,
    torch: str | None = "2.11.0",
    built: tuple[int, int] | None = (12, 8),
    triton: str | None = "3.6.0",
    device: Device | None = None,
) -> Sequence[Finding]:
    versions = {"torch": torch, "triton": triton}
    monkeypatch.setattr(probe, "read_driver", lambda: driver)
    monkeypatch.setattr(probe, "torch_cuda", lambda: built)
    monkeypatch.setattr(probe, "version_of", versions.__getitem__)
    return probe.findings(device)


def test_a_machine_that_has_all_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found(monkeypatch, Driver((13, 0), (H100,)))
    assert all(f.ok for f in findings)
    said = "; ".join(f"{f.subject}: {f.text}" for f in findings)
    assert said == (
        "GPU driver: runs CUDA 13.0; GPU: NVIDIA H100, 80.0 GiB, compute capability 9.0; "
        "PyTorch: 2.11.0 for CUDA 12.8; Triton: 3.6.0"
    )
    two = Driver((13, 0), (H100, H100))
    assert all(f.ok for f in found(monkeypatch, two, device=Device(torch_name="cuda:1")))


@pytest.mark.parametrize(
    ("driver", "packages", "said"),
    [
        (None, {}, "there is no NVIDIA GPU here"),
        (Driver((12, 4), (), "the GPU's driver does not start: error 999"), {}, "does not start"),
        (Driver((12, 4), ()), {}, "no GPU 0: this process may use none; CUDA_VISIBLE_DEVICES"),
        (Driver((12, 4), (H100,)), {"device": Device(torch_name="cuda:3")}, "no GPU 3: this process may use 1"),
        (Driver((12, 4), (Gpu("Tesla V100", 16 << 30, (7, 0)),)), {}, "V100.*too old: the kernels need 8.0"),
        (Driver((12, 4), (H100,)), {"torch": None}, "PyTorch is not installed: pip install 'paceline.cuda.'"),
        (Driver((12, 4), (H100,)), {"built": None}, "2.11.0 was built without CUDA: install"),
        (Driver((12, 4), (H100,)), {"built": (13, 0)}, "wants CUDA 13.0, the driver runs 12.4: install a newer"),
        (Driver((12, 4), (H100,)), {"triton": None}, "Triton is not installed: pip install"),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, packages: dict[str, Any], said: str
) -> None:
    problems = [f.text for f in found(monkeypatch, driver, **packages) if not f.ok]
    assert len(problems) == 1
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(problems[0])


def test_a_host_needs_pytorch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Device(torch_name="cpu")
    assert all(f.ok for f in found(monkeypatch, None, built=None, triton=None, device=host))
    assert not all(f.ok for f in found(monkeypatch, None, torch=None, device=host))


def test_nothing_is_loaded_where_there_is_no_device_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(probe.ctypes, "CDLL", asked.append)
    read = probe.read_driver.__wrapped__
    assert read(tmp_path) is None
    assert asked == []
    (tmp_path / "nvidiactl").touch()
    assert read(tmp_path) is None
    (tmp_path / "nvidia0").touch()
    driver = read(tmp_path)
    assert driver is not None
    assert asked == ["libcuda.so.1"]
    assert "install its driver" in driver.problem


def test_the_driver_is_asked_by_its_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(pointer: Any, value: int) -> int:
        pointer._obj.value = value
        return 0

    def name(buffer: Any, size: int, device: Any) -> int:
        buffer.value = f"GPU {device.value}".encode()
        return 0

    library = SimpleNamespace(
        cuDriverGetVersion=lambda p: put(p, 12080),
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda p: put(p, 2),
        cuDeviceGet=put,
        cuDeviceGetName=name,
        cuDeviceTotalMem_v2=lambda p, device: put(p, 80 << 30),
        cuDeviceGetAttribute=lambda p, which, device: put(p, {75: 9, 76: 0}[which]),
    )
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(probe.ctypes, "CDLL", lambda name: library)
    read = probe.read_driver.__wrapped__
    expected = (Gpu("GPU 0", 80 << 30, (9, 0)), Gpu("GPU 1", 80 << 30, (9, 0)))
    assert read(tmp_path) == Driver((12, 8), expected)
    library.cuInit = lambda flags: 100
    assert read(tmp_path) == Driver((12, 8), ())
    library.cuInit = lambda flags: 803
    assert "error 803" in read(tmp_path).problem


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'", (12, 8)),
        ("cuda = '13.0'", (13, 0)),
        ("cuda: Optional[str] = None", None),
        ("hip = '6.1'", None),
    ],
)
def test_the_cuda_of_pytorch_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, cuda: tuple[int, int] | None
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\ndebug = False\n{line}\n")
    where = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(probe, "find_spec", lambda name: where)
    assert probe.torch_cuda() == cuda


def test_auto_asks_without_importing_torch() -> None:
    """In a process of its own; here there may be a GPU or none."""
    code = (
        "import sys\nfrom paceline.backend.registry import choose_backend\nprint(choose_backend('auto')[0].name)\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_choose", registry._choose.__wrapped__)


@pytest.mark.usefixtures("_fresh")
def test_auto_takes_the_gpu_where_all_is_there_and_says_why_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, Driver((13, 0), (H100,)))
    spec, why = registry.choose_backend("auto")
    assert (spec.name, why) == ("cuda", "auto: cuda has what it needs here")
    found(monkeypatch, None)
    spec, why = registry.choose_backend("auto")
    assert (spec.name, why) == ("native", "auto: no cuda, as there is no NVIDIA GPU here")
    assert registry.choose_backend("reference") == (BACKENDS["reference"], "as asked")


def test_a_device_that_is_not_there_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"device cuda:7: there is no NVIDIA GPU here.*--device cpu"):
        device_memory.torch_device(Device(torch_name="cuda:7"))
    assert device_memory.torch_device(Device(frozenset({0}))).type == "cpu"
    found(monkeypatch, Driver((13, 0), (H100,)))
    for name in ("cuda:abc", "cuda:1:2"):
        with pytest.raises(ConfigError, match=f"device {name}: Invalid device string"):
            device_memory.torch_device(Device(torch_name=name))
    assert device_memory.free_bytes(Device(torch_name="cpu")) > 1 << 20
