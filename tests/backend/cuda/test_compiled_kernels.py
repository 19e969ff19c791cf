"""Every listed kernel compiles for sm_90, and some for sm_80, to the machine code that speed and bits rest on.

`python -m tests.backend.cuda.compile_kernels --capability 80` compiles all for sm_80.
"""

from __future__ import annotations

import pytest

from paceline.backend.cuda.kernel_launch import ALIGNMENT, variant_table
from paceline.backend.cuda.products import BLOCKS, product_variant

triton = pytest.importorskip("triton", reason="kernels need Triton's compiler")

from tests.backend.cuda.compile_kernels import differs, everyday, faults  # noqa: E402 - it imports Triton

TABLE = variant_table()


@pytest.mark.parametrize(("capability", "name"), everyday())
def test_machine_code(capability, name):
    """As recorded of these sources; compiled where they have changed since."""
    assert faults(TABLE[name], capability) == []


@pytest.mark.parametrize("blocks", [b for b in BLOCKS["plain"] if b != b.small])
def test_blocks_of_small_devices_fit_them(blocks):
    both = frozenset({"N", "K"})
    variant = product_variant("plain", "bf16", blocks.small, parallel=False, bias=False, aligned=both)
    assert faults(variant, 86) == []


def test_attention_fits_small_devices_as_it_is():
    assert faults(TABLE["attend_parts bf16 bf16 8x4 128 older"], 86) == []


@pytest.mark.parametrize("name", ["finish bf16 4 bias", "keep_while_chosen"])
def test_the_record_is_what_the_compiler_makes(name):
    """The nightly run compiles all of them again."""
    assert not differs(TABLE[name], 90)


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
