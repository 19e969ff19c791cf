"""Single experts of files that keep all experts of a layer in one tensor.

Each expert is a view of its own bytes, read when asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import BadModelFile
from paceline.model.experts import MAX_EXPERTS
from paceline.model.files.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.model.files.gguf_file import GgufTensor
    from paceline.model.files.stored import Stored

# A tensor of all experts of a layer. Gate and up are one above the other (transformers 5) or alternate by rows.
_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias|_blocks|)")
_WORDS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
_STACKED = re.compile(r"(blk\.\d{1,5}\.ffn_(?:gate|up|down))_exps\.(weight|bias)")
_FOUR_BIT_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_BLOCK = 32  # numbers that share a power of two
_SCALE_BIAS = 127


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Rows of a view at equal distances, as where gate and up alternate."""

    view: StoredTensor | FourBitFloats
    first: int
    step: int
    transposed: bool = False  # the matrix is stored as [in, out]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reading."""
        rows, *others = reversed(self.view.shape) if self.transposed else self.view.shape
        return (rows // self.step, *others)

    def read(self) -> NDArray[floating]:
        """Return the rows."""
        whole = self.view.read()
        rows = whole.T if self.transposed else whole
        return np.ascontiguousarray(rows[self.first :: self.step])


@dataclass(frozen=True, slots=True)
class FourBitFloats:
    """An expert's matrix in MXFP4 (OCP Microscaling 1.0): 4-bit floats, powers of two."""

    blocks: StoredTensor  # [out, in / 32, 16], the first of two numbers in the low bits
    scales: StoredTensor  # [out, in / 32]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reading."""
        return (self.scales.shape[0], self.scales.shape[1] * _BLOCK)

    def read(self) -> NDArray[float32]:
        """Return the matrix in float32. Raises `BadModelFile`."""
        codes = self.blocks.raw().data.reshape(*self.scales.shape, _BLOCK // 2)
        powers = self.scales.raw().data.astype(np.int32) - _SCALE_BIAS
        table = np.concatenate([_FOUR_BIT_VALUES, -_FOUR_BIT_VALUES])
        values = np.stack([table[codes & 15], table[codes >> 4]], axis=-1).reshape(*self.scales.shape, _BLOCK)
        with np.errstate(all="ignore"):  # odd scales in a file give odd weights, not warnings
            numbers: NDArray[float32] = np.ldexp(values, powers.reshape(*self.scales.shape, 1))
        return numbers.reshape(self.shape)


def unfused(found: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return tensors by name, fused experts by the names of single ones. Raises `BadModelFile`."""
    tensors: dict[str, Stored] = {}
    stored = {name: tensor for name, tensor in found.items() if isinstance(tensor, StoredTensor)}
    for name, tensor in found.items():
        match = _FUSED.fullmatch(name)
        if match is None or name not in stored:
            tensors[name] = tensor
            continue
        words, kind = _WORDS[match[2]], "bias" if match[3] == "_bias" else "weight"
        for index in range(_num_experts(name, tensor.shape)):
            for part, word in enumerate(words):
                view = _part(stored, name, index, part, len(words))
                tensors[f"{match[1]}.{index}.{word}.{kind}"] = view
    return tensors


def _part(found: Mapping[str, StoredTensor], name: str, index: int, part: int, num_parts: int) -> Stored:
    """Return one of an expert's matrices or biases."""
    view = _view(found[name], index)
    if name.endswith("_bias"):
        return Interleaved(view, part, num_parts)
    if name.endswith("_blocks"):
        scales = found.get(name.removesuffix("_blocks") + "_scales")
        if scales is None or scales.shape != found[name].shape[:-1] or view.shape[-1] != _BLOCK // 2:
            raise BadModelFile(f"{name!r} lacks its scales, or they do not fit: download the model again")
        if len(view.shape) != 3 or {view.dtype, scales.dtype} != {"U8"}:
            raise BadModelFile(
                f"{name!r} has shape {found[name].shape} and type {view.dtype}, its scales {scales.dtype}; "
                "experts in MXFP4 have four dimensions, and U8 for both: convert the model again"
            )
        return Interleaved(FourBitFloats(view, _view(scales, index)), part, num_parts)
    if f"{name}_bias" in found:
        return Interleaved(view, part, num_parts, transposed=True)
    if len(view.shape) != 2 or view.shape[0] % num_parts:
        raise BadModelFile(f"{name!r} has shape {found[name].shape}, which is not that of a layer's experts")
    return _view(replace(view, shape=(num_parts, view.shape[0] // num_parts, view.shape[1])), part)


def _num_experts(name: str, shape: tuple[int, ...]) -> int:
    if len(shape) < 2 or not 1 <= shape[0] <= MAX_EXPERTS:
        raise BadModelFile(f"{name!r} has shape {shape}, which is not that of a layer's experts")
    return shape[0]


def _view(tensor: StoredTensor, index: int) -> StoredTensor:
    """Return one of the tensors that are stacked in another tensor."""
    size = tensor.num_bytes // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], start=tensor.start + index * size, num_bytes=size)


def unstacked(found: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """Return a GGUF file's tensors by name, stacked experts one by one. Raises `BadModelFile`."""
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in found.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            tensors[name] = tensor
            continue
        num = _num_experts(name, tensor.shape)
        size = tensor.num_bytes // num
        for index in range(num):
            view = replace(tensor, shape=tensor.shape[1:], start=tensor.start + index * size)
            tensors[f"{match[1]}.{index}.{match[2]}"] = view
    return tensors
