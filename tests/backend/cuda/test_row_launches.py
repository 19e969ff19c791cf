"""Steps and drafting on a device launch few operations."""

from __future__ import annotations

from tests.backend.cuda.interpreter import run_interpreted


def test_kernels_do_the_same_in_the_interpreter() -> None:
    run_interpreted("interpreted_rows.py")
