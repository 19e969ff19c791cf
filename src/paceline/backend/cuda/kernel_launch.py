"""Kernels and their variants: launches, tests and the offline compile read the same declarations.

A module that launches kernels makes its `Variant`s in a pure function of types and shapes, and lists typical ones:

    @lru_cache
    def copy_variant(element: str, width: int) -> Variant:
        return Variant(
            name=f"copy {element} {width}",
            kernel="copy_kernels:copy_rows",
            arguments={"source": f"*{element}", "target": f"*{element}", "num_tokens": "i32"},
            constants={"WIDTH": width},
        )

    @lists_variants
    def variants() -> list[Variant]:
        return [copy_variant("bf16", 4096)]

    launch(copy_variant("bf16", 4096), (num_tokens,), source, target, num_tokens)

Pointers are aligned to 16 bytes, except those named in `unaligned`. Integers named in `aligned` are multiples of
16. Kernels name all other integers in `do_not_specialize`, so that the batch never chooses the code that runs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Lister = TypeVar("Lister", bound=Callable[[], Iterable["Variant"]])

ALIGNMENT = 16  # bytes to which pointers are aligned; aligned integers are multiples of it, too
DESCRIPTOR = "tensordesc"  # prefix of the types of descriptors
# Modules of this folder that list variants.
LISTING_MODULES = (
    *("products", "tiles", "rowwise", "attention", "choice", "judge"),
    *("row_launches", "late_lookup", "late_hints"),
)
ELEMENTS = {  # Triton's names of element types
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
NO_PDL = {"PDL": False}  # constant of kernels that know how to begin early
PIPELINED = "DEPBAR"  # opcode of a wait during which a product of matrices goes on
_listers: list[Callable[[], Iterable[Variant]]] = []
_begins_early = False


@dataclass(frozen=True, eq=False)
class Variant:
    """One compiled form of a kernel, and what its machine code must look like."""

    name: str  # unique
    kernel: str  # module of device_code:function
    arguments: Mapping[
        str, str
    ]  # all but constants, in the function's order: "*bf16", "i32", "fp32", "none", see `descriptor_type`
    constants: Mapping[str, int | float | bool | str] = field(default_factory=dict)  # its `tl.constexpr`
    aligned: frozenset[str] = frozenset()  # integers that are multiples of 16
    unaligned: frozenset[str] = frozenset()  # pointers that may begin anywhere, as slices of index tensors do
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = False  # multiplications and additions may become one instruction
    opcodes: tuple[str, ...] = ()  # opcodes that sm_90 code must have: LDGSTS, HGMMA or HGMMA.64x16x16
    forbidden_opcodes: tuple[str, ...] = ()  # opcodes that it must not have
    capability: int = 80  # least compute capability that it compiles for
    before_hopper: bool = False  # only older devices launch it
    pdl: bool = False  # programmatic dependent launch: programs begin while the kernel before it ends

    def load(self) -> Any:
        """Import its kernel."""
        return _kernel(self.kernel)

    def options(self) -> dict[str, Any]:
        """Return options of the compiler."""
        early = {"launch_pdl": True} if self.pdl else {}
        own = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**own, "enable_fp_fusion": self.fp_fusion, **early}

    def check(self, arguments: tuple[Any, ...]) -> None:
        """Assert that arguments are of the declared types."""
        assert len(arguments) == len(self.arguments), f"{self.name}: {len(arguments)} arguments"
        for (name, kind), value in zip(self.arguments.items(), arguments, strict=True):
            where = f"{self.name}: {name}"
            if value is None:
                assert kind == "none", f"{where} is missing"
            elif isinstance(value, torch.Tensor):
                assert kind == f"*{ELEMENTS[value.dtype]}", f"{where} is {value.dtype}"
                assert name in self.unaligned or not value.data_ptr() % ALIGNMENT, f"{where} is not aligned"
            elif kind.startswith(DESCRIPTOR):
                assert kind == _type_of(value), f"{where} is {_type_of(value)}"
            elif name in self.aligned:
                assert not value % ALIGNMENT, f"{where} is {value}"


@lru_cache
def with_pdl(variant: Variant) -> Variant:
    """Return a variant that begins early, of a kernel with the constant PDL."""
    constants = {**variant.constants, "PDL": True}
    return replace(variant, name=f"{variant.name} pdl", constants=constants, capability=90, pdl=True)


@lru_cache
def _kernel(path: str) -> Any:
    module, function = path.split(":")
    return getattr(import_module(f"{__package__}.device_code.{module}"), function)


# Descriptors, by which a device copies tiles of a tensor


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor of tiles of a contiguous matrix."""
    return described(tensor, tensor.shape, [rows, columns])


def described(base: Any, shape: Iterable[int], block: list[int]) -> Any:
    """Return a descriptor of two dimensions.

    base: a tensor, or what stands in for one.
    """
    num_rows, width = shape
    return _kernel("tile_kernels:TensorDescriptor")(base, [num_rows, width], [width, 1], block)


def descriptor_type(element: str, rows: int, columns: int) -> str:
    """Return Triton's name of the type of a descriptor."""
    return f"{DESCRIPTOR}<{element}[{rows}, {columns}]>"


def _type_of(value: Any) -> str:
    return descriptor_type(ELEMENTS[value.base.dtype], *value.block_shape)


def aligned_names(**sizes: int) -> frozenset[str]:
    """Return the names of sizes that are multiples of 16."""
    return frozenset(name for name, size in sizes.items() if size % ALIGNMENT == 0)


def unaligned_marks(aligned: frozenset[str], *names: str) -> str:
    """Return what a variant's name says of sizes that are not aligned."""
    return "".join(f" odd {name}" for name in names if name not in aligned)


# Variants that there are --------------------------------------------------------------------------


def lists_variants(lister: Lister) -> Lister:
    """Register a function that lists a module's typical variants."""
    _listers.append(lister)
    return lister


def variant_table() -> dict[str, Variant]:
    """Return every listed variant by name."""
    for module in LISTING_MODULES:
        if find_spec(f"{__package__}.{module}") is not None:
            import_module(f"{__package__}.{module}")
    listed = [variant for lister in _listers for variant in lister()]
    table = {variant.name: variant for variant in listed}
    assert len(table) == len(listed), "two variants of one name"
    return table


# Launches -----------------------------------------------------------------------------------------


@lru_cache
def interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter: on the host, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def uses_kernels(tensor: torch.Tensor) -> bool:
    """Return True if kernels take this tensor; otherwise PyTorch does the same work."""
    return (tensor.is_cuda or interpreted()) and tensor.dtype != torch.float64


def begin_early(*, yes: bool) -> None:
    """Turn PDL on or off, for kernels that know it. For measurements, before any capture."""
    global _begins_early  # noqa: PLW0603 - one for the process, like the kernels
    _begins_early = yes


def launch(variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
    """Run a kernel over a grid of programs; a grid without programs runs nothing."""
    if interpreted():
        variant.check(arguments)
    if _begins_early and "PDL" in variant.constants:
        variant = with_pdl(variant)
    if all(grid):
        variant.load()[grid](*arguments, **variant.constants, **variant.options())


@lru_cache
def num_processors(device: torch.device) -> int:
    """Return a device's number of multiprocessors, for programs that share a work list."""
    return 3 if interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


def cdiv(number: int, size: int) -> int:
    """Return how many pieces of `size` cover `number`."""
    return -(-number // size)


def block_of(number: int) -> int:
    """Return the least power of two that covers `number`."""
    return 1 << (number - 1).bit_length()
