"""Tensors of quantised folders, checked and joined to the matrices that they make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.errors import BadModelFile, UnsupportedModel
from paceline.model.files.scaled_tensors import (
    FLOAT8,
    ORDER_MAPS,
    WORD_BITS,
    QuantisedMatrix,
    ScaleBlocks,
    unpack_awq,
    unpack_gptq,
    unpack_plain,
    unpack_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.model.files.safetensors_file import StoredTensor
    from paceline.model.files.stored import Stored

    Parts = Mapping[str, StoredTensor]

ADVICE = "take the model in BF16, or a GGUF file of it such as Q4_K_M or Q8_0"
WHOLE = 1 << 40  # stands for all rows, or columns, of a matrix: more than any matrix has
ZERO, ORDER = "weight_zero_point", "weight_g_idx"
_WEIGHT = "weight"
_PLAIN_TYPES = ("I8", FLOAT8)
_FLOATS = ("F64", "F32", "F16", "BF16")
# Ends of the names of tensors that mean nothing without a format that reads them.
_ONLY_QUANTISED = {
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_zero_point", "weight_shape",
    "weight_g_idx", "weight_global_scale", "qweight", "qzeros", "scales", "g_idx", "SCB", "absmax", "quant_map",
    "nested_absmax", "nested_quant_map", "W_q", "codes", "codebooks",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Facts that a folder's config says of its quantised matrices."""

    layouts: tuple[Layout, ...]
    blocks: tuple[ScaleBlocks, ...]  # scale blocks that matrices may have
    bits: tuple[int, ...] = (8,)
    first_zero: int = 0

    def joined(self, found: Parts) -> dict[str, Stored]:
        """Return tensors by name, quantised ones as one matrix. Raises `BadModelFile`, `UnsupportedModel`."""
        rest: dict[str, Stored] = dict(found)
        made: dict[str, Stored] = {}
        for name in found:
            prefix, _, end = name.rpartition(".")
            for layout in self.layouts:
                parts = layout.parts_of(f"{prefix}.", end, found)
                if parts:
                    made[f"{prefix}.{_WEIGHT}"] = layout.matrix(f"{prefix}.{end}", parts, self)
                    for part in parts:
                        rest.pop(f"{prefix}.{part}", None)
        _refuse_leftovers(rest, "the folder's quantization_config does not explain")
        return rest | made


def _refuse_leftovers(found: Mapping[str, Stored], why: str) -> None:
    for name in found:
        if name.rpartition(".")[2] in _ONLY_QUANTISED:
            raise UnsupportedModel(f"{why} the tensor {name!r}, and without it weights would be wrong: {ADVICE}")


def joined_tensors(quantisation: Quantisation | None, found: Parts) -> dict[str, Stored]:
    """Return a folder's tensors by name as its config says. Raises `BadModelFile`, `UnsupportedModel`."""
    if quantisation is not None:
        return quantisation.joined(found)
    _refuse_leftovers(found, "config.json has no quantization_config that explains")
    return dict(found)


# Layouts -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """Spread of a format's matrix over tensors, by the ends of their names."""

    main: str
    needed: tuple[str, ...]  # ends needed beside `main`; of ends separated by | the first that is there
    optional: tuple[str, ...]
    make: Callable[[str, Parts, Quantisation], QuantisedMatrix]
    types: tuple[str, ...] = ("I32",)  # types that `main` may have

    def parts_of(self, prefix: str, end: str, found: Parts) -> dict[str, StoredTensor]:
        """Return a matrix's tensors if `end` is this layout's main tensor; else none."""
        if end != self.main or found[prefix + end].dtype not in self.types:
            return {}
        parts = {end: found[prefix + end]}
        for names in self.needed:
            known = [name for name in names.split("|") if prefix + name in found]
            if not known:
                missing = names.replace("|", " or ")
                raise BadModelFile(
                    f"{prefix + end!r} is quantised but has no {missing!r}; the download may be incomplete"
                )
            parts[known[0]] = found[prefix + known[0]]
        return parts | {name: found[prefix + name] for name in self.optional if prefix + name in found}

    def needing(self, end: str) -> Layout:
        """Return the layout with one of its optional tensors needed."""
        return replace(self, needed=(*self.needed, end)) if end in self.optional else self

    def matrix(self, name: str, parts: Parts, quantisation: Quantisation) -> QuantisedMatrix:
        """Return the matrix of these parts. Raises `BadModelFile`, `UnsupportedModel` if they do not fit."""
        if len(parts[self.main].shape) != 2 or 0 in parts[self.main].shape:
            raise BadModelFile(f"{name!r} of shape {parts[self.main].shape} is no matrix")
        return self.make(name, parts, quantisation)


def _plain(name: str, parts: Parts, said: Quantisation) -> QuantisedMatrix:
    shape = (parts[_WEIGHT].shape[0], parts[_WEIGHT].shape[1])
    scales = parts["weight_scale"] if "weight_scale" in parts else parts["weight_scale_inv"]
    blocks = _blocks(name, shape, scales, said)
    if "weight_zero_point" in parts:
        _expect(name, parts["weight_zero_point"], "weight_zero_point", scales.shape, ("I8",))
    matrix = QuantisedMatrix(name, shape, parts, unpack_plain, blocks)
    _check_order(matrix)
    return matrix


def _rows(name: str, parts: Parts, said: Quantisation) -> QuantisedMatrix:
    packed, sides = parts["weight_packed"].shape, parts["weight_shape"]
    _expect(name, sides, "weight_shape", (2,), ("I64", "I32"))
    out, columns = (int(n) for n in sides.read_integers())
    bits = next((b for b in said.bits if (out, -(-columns * b // WORD_BITS)) == packed), None)
    if bits is None or out < 1 or columns < 1:
        raise BadModelFile(f"{name!r} of shape {packed} cannot hold {out} x {columns} numbers of {said.bits} bits")
    blocks = _blocks(name, (out, columns), parts["weight_scale"], said)
    matrix = QuantisedMatrix(name, (out, columns), parts, unpack_rows, blocks, bits)
    if "weight_zero_point" in parts:
        rows, per_row = matrix.scales_shape
        words = (-(-rows * bits // WORD_BITS), per_row)
        _expect(name, parts["weight_zero_point"], "weight_zero_point", words, ("I32",))
    _check_order(matrix)
    return matrix


def _gptq(name: str, parts: Parts, said: Quantisation) -> QuantisedMatrix:
    (bits,) = said.bits
    words, out = parts["qweight"].shape
    matrix = QuantisedMatrix(
        name, (out, words * WORD_BITS // bits), parts, unpack_gptq, said.blocks[0], bits, said.first_zero
    )
    return _check_turned(matrix)


def _awq(name: str, parts: Parts, said: Quantisation) -> QuantisedMatrix:
    (bits,) = said.bits
    columns, words = parts["qweight"].shape
    matrix = QuantisedMatrix(name, (words * WORD_BITS // bits, columns), parts, unpack_awq, said.blocks[0], bits)
    return _check_turned(matrix)


def _check_turned(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Check the parts of formats that store [in, out]. Raises `BadModelFile`."""
    out, per_row = matrix.shape[0], matrix.scales_shape[1]
    _expect(matrix.name, matrix.parts["scales"], "scales", (per_row, out), _FLOATS)
    _expect(matrix.name, matrix.parts["qzeros"], "qzeros", (per_row, out * matrix.bits // WORD_BITS), ("I32",))
    _check_order(matrix)
    return matrix


def _check_order(matrix: QuantisedMatrix) -> None:
    for order in ORDER_MAPS:
        if order in matrix.parts:
            _expect(matrix.name, matrix.parts[order], order, matrix.shape[1:], ("I32", "I64"))


def _expect(name: str, part: StoredTensor, end: str, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    if part.shape != shape or part.dtype not in types:
        raise BadModelFile(
            f"{name!r} needs {end!r} of shape {shape} and type {' or '.join(types)}; it has {part.shape} and"
            f" {part.dtype}"
        )


def _blocks(name: str, shape: tuple[int, int], scales: StoredTensor, said: Quantisation) -> ScaleBlocks:
    """Return those blocks of the config that fit scales of this shape. Raises `BadModelFile`."""
    if scales.dtype not in _FLOATS:
        raise UnsupportedModel(
            f"{name!r} has scales of type {scales.dtype}; known: {', '.join(_FLOATS)}; {ADVICE}"
        )
    for blocks in said.blocks:
        if [n for n in blocks.of_scales(shape) if n > 1] == [n for n in scales.shape if n != 1]:
            return ScaleBlocks(min(blocks.rows, shape[0]), min(blocks.columns, shape[1]))
    known = ", ".join(str(b.of_scales(shape)) for b in said.blocks)
    raise BadModelFile(
        f"{name!r} of shape {shape} has scales of shape {scales.shape}; its config asks for {known}"
    )


PLAIN = Layout(_WEIGHT, ("weight_scale|weight_scale_inv",), (ZERO, ORDER), _plain, _PLAIN_TYPES)
ROWS = Layout("weight_packed", ("weight_scale", "weight_shape"), (ZERO, ORDER), _rows)
GPTQ = Layout("qweight", ("qzeros", "scales"), ("g_idx",), _gptq)
AWQ = Layout("qweight", ("qzeros", "scales"), (), _awq)
