"""Kernels in Triton's interpreter: a process of its own, as the switch is read when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run_interpreted(file_name: str) -> None:
    """Run a file of tests in this folder with kernels in the interpreter; assert that all pass."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", str(FOLDER / file_name), "-q", "-n0", "-p", "no:cacheprovider"]
    command += ["-W", "ignore::RuntimeWarning"]  # numpy warns of overflows that a device computes with
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
