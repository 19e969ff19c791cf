"""Where a figure was measured: machine, versions, commit, memory."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


def processor() -> dict[str, Any]:
    """Return what the speed of a model depends on: processor and cores."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def machine() -> dict[str, Any]:
    """Return what figures depend on: processor, cores, memory, system, versions below ours."""
    return {
        **processor(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
    }


def _version(package: str) -> str | None:
    """Return the version of an installed package without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return the commit of the code that runs; None outside a checkout.

    If it was changed, with -dirty and a hash of the changes: two of them are two builds.
    """
    try:
        found = _git(folder, "describe", "--always", "--dirty", "--abbrev=12").decode().strip()
        changes = _git(folder, "diff", "HEAD") if found.endswith("-dirty") else b""
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{found}-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else found or None


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", *arguments]  # wherever git is
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=10, check=True)  # noqa: S603 (our own)
    return done.stdout


def memory_bytes() -> int:
    """Return the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def reset_peak_rss() -> None:
    """Start a new peak of this process's memory, where the system can."""
    try:
        (_PROC / "self" / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return  # then the peak is that of the whole process


def peak_rss_mb() -> float:
    """Return the peak of this process's memory since the reset, engines of other drafters included."""
    for line in _lines(_PROC / "self" / "status"):
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1e3, 1)
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)


def _cpu_name() -> str:
    names = (line.partition(":")[2].strip() for line in _lines(_PROC / "cpuinfo") if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
