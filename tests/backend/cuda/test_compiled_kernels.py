"""Every listed kernel compiles for sm_90, and some for sm_80, to the machine code that speed and bits rest on.

`python -m tests.backend.cuda.compile_kernels --capability 80` compiles all for sm_80.
"""

from __future__ import annotations

import pytest

from paceline.backend.cuda.kernel_launch import ALIGNMENT, variant_table

triton = pytest.importorskip("triton", reason="kernels need Triton's compiler")

from tests.backend.cuda.compile_kernels import faults  # noqa: E402 - it imports Triton

TABLE = variant_table()


EVERYDAY = [(90, name) for name in TABLE]
EVERYDAY += [(80, name) for name in [n for n, v in TABLE.items() if v.capability <= 80][::5]]


@pytest.mark.parametrize(("capability", "name"), EVERYDAY)
def test_machine_code(capability, name):
    assert faults(TABLE[name], capability) == []


@pytest.mark.parametrize("name", TABLE)
def test_the_batch_never_chooses_the_code(name):
    """Triton compiles another kernel for integers that are 1 or multiples of 16, unless told not to."""
    variant, kernel = TABLE[name], TABLE[name].load()
    assert kernel.arg_names == [*variant.arguments, *variant.constants]
    loose = {p.name for p in kernel.params if p.do_not_specialize}
    integers = {n for n, kind in variant.arguments.items() if kind in ("i32", "i64")}
    of_shapes = {n for n in integers if n in variant.aligned or f"odd {n}" in name}
    assert integers - of_shapes <= loose
    assert variant.unaligned <= loose
    assert not variant.aligned & loose
    assert ALIGNMENT == 16
