"""Environments of the other engines, each made once and apart from Paceline's own."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library
from importlib.metadata import distributions
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tools.peers.rows import PeerEngine

STAMP = "installed"


def python_of(engine: PeerEngine, folder: Path) -> str:
    """Return the Python that an engine's workers run in."""
    return str(folder / engine.name / "bin" / "python") if engine.packages else sys.executable


def preloads(engine: PeerEngine, folder: Path) -> dict[str, str]:
    """Return the environment variable that preloads the existing libraries of an engine."""
    files = [str(f) for f in (folder / engine.name / name for name in engine.preload) if f.is_file()]
    found = [soname for name in engine.preload_found if (soname := find_library(name))]
    return {"LD_PRELOAD": ":".join(files + found)} if files or found else {}


def install(engine: PeerEngine, folder: Path, runs: Callable[[], bool] | None = None) -> None:
    """Make an engine's environment unless it exists. Raises `ConfigError` with pip's last error line.

    runs: tells whether what was installed runs on this processor. Where it does not, the engine is installed as
    `PeerEngine.safely` says.
    """
    stamp = folder / engine.name / STAMP
    found = stamp.read_text(encoding="utf-8") if stamp.is_file() else None
    if not engine.packages or found in (_stamp(engine), _stamp(engine.safely())):
        return
    _make(engine, folder)
    if engine.safer and runs is not None and not runs():
        _make(engine.safely(), folder)


def _make(engine: PeerEngine, folder: Path) -> None:
    log = folder / f"{engine.name}.log"
    log.write_bytes(b"")
    _run([sys.executable, "-m", "venv", "--clear", str(folder / engine.name)], log)
    pip = [python_of(engine, folder), "-m", "pip", "install", "--no-input", *engine.options]
    variables = dict(engine.variables)
    if not engine.without:
        _run([*pip, *engine.packages], log, variables)
    else:
        first, *others = engine.packages
        _run([*pip, "--no-deps", first], log, variables)
        needed = requirements(_requires(engine, folder), engine.without)
        _run([*pip, *needed, *others], log, variables)
    (folder / engine.name / STAMP).write_text(_stamp(engine), encoding="utf-8")


def _stamp(engine: PeerEngine) -> str:
    return "\n".join([*engine.packages, *engine.options, *(f"{k}={v}" for k, v in engine.variables)])


def requirements(requires: Sequence[str], without: frozenset[str]) -> list[str]:
    """Return the requirements that apply here, without extras and without the names in `without`."""
    found = []
    for text in requires:
        r = Requirement(text)
        if r.name not in without and (r.marker is None or r.marker.evaluate({"extra": ""})):
            extras = f"[{','.join(sorted(r.extras))}]" if r.extras else ""
            found.append(f"{r.name}{extras}{r.specifier}")
    return found


def _requires(engine: PeerEngine, folder: Path) -> list[str]:
    name = Requirement(engine.packages[0]).name
    places = [str(p) for p in (folder / engine.name / "lib").glob("python*/site-packages")]
    return next((list(d.requires or ()) for d in distributions(name=name, path=places)), [])


def _run(command: Sequence[str], log: Path, variables: dict[str, str] | None = None) -> None:
    with log.open("ab") as output:
        done = subprocess.run(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | (variables or {}),
            check=False,
        )
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.lower().startswith("error")] or lines or ["no message"]
        raise ConfigError(f"{errors[-1].strip()[:200]} (see {log})")
