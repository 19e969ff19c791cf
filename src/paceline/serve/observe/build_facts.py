"""Facts about this build: version, commit, instruction set, backends."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from paceline import __version__
from paceline.backend.registry import BACKENDS


@cache
def commit() -> str:
    """Return the commit of a checkout; empty for an installed package."""
    folder = Path(__file__).parents[4]
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()[:64]


def version_line() -> str:
    """Return what `paceline --version` says."""
    try:
        from paceline import kernels

        isa = kernels.isa()
    except (ImportError, OSError) as error:
        isa = f"kernels cannot be loaded: {error}"
    made = f" ({commit()})" if commit() else ""
    return f"paceline {__version__}{made}, {isa}, backends {', '.join(BACKENDS)}"
