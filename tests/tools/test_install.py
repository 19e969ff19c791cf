"""scripts/install: when it installs, and when it has nothing to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install"
PYTHON = """#!/bin/sh
case "$*" in *"pip install"*) echo "$*" >>"$0.installs";; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a virtual environment whose Python only notes what it is told to install."""
    for folder in ("scripts/requirements", "csrc", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("pyproject.toml", "CMakeLists.txt", "csrc/kernel.cpp"):
        (tmp_path / name).write_text("one\n")
    for program in ("python", "paceline"):
        (tmp_path / ".venv/bin" / program).write_text(PYTHON)
        (tmp_path / ".venv/bin" / program).chmod(0o755)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    return tmp_path


def installs(checkout: Path, *arguments: str) -> bool:
    """Run the script; True if it installed something."""
    noted = checkout / ".venv/bin/python.installs"
    noted.unlink(missing_ok=True)
    subprocess.run([checkout / "scripts/install", *arguments], check=True, capture_output=True, timeout=60)
    return noted.exists()


def test_only_what_was_installed_last_is_installed(checkout: Path) -> None:
    assert installs(checkout)
    assert not installs(checkout)
    assert not installs(checkout, "--runtime"), "the tools of development come on top"
    kernel = checkout / "csrc/kernel.cpp"
    kernel.write_text("two\n")
    assert installs(checkout)
    kernel.write_text("one\n")
    assert installs(checkout), "the kernels that are built are those of the second commit"
