"""Tests of kernels in Triton's interpreter, which is chosen when Triton is imported: each file needs a process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def run_interpreted(name: str) -> None:
    """Run the tests of one file of this folder in an interpreter of their own."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install 'paceline[dev]' on Linux")
    path = Path(__file__).parent / f"{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
