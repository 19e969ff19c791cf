"""Weights onto a device.

Weights of 16-bit files go there as they are, random weights are made there, all others pass through floats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn import functional

from paceline.backend.cuda.matrix import Matrix
from paceline.backend.cuda.products import pack_matrix, segment_of_part
from paceline.model.files.stored import KeepsHalves
from paceline.model.shapes import HALF, MASK, MIX, ROW_STEP, RandomTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.cuda.ranks import Dealer
    from paceline.model.files.stored import Stored

    Weights = Mapping[str, NDArray[floating]]

# Type of the weights -> type that a pass computes in.
TYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "fp8": torch.bfloat16,
    "int4": torch.bfloat16,
}
# Four bits are too few for the output matrix: its rounding errors are errors of logits.
_OUTPUT_TYPES = {"int4": "fp8"}
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
_RANDOM_NUMBERS = 1 << 24  # numbers that are made at once; each takes a word of eight bytes while it is made


@dataclass(frozen=True, slots=True)
class Setup:
    """Types, numerics and device of one executor."""

    device: torch.device
    weight_type: str
    kv_type: str
    fast: bool  # True: products of any algorithm, not batch-invariant ones
    num_ranks: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """Type that a pass computes in."""
        return TYPES[self.weight_type]

    def describe_device(self) -> str:
        """Return device and numerics, in a few words."""
        where = "this machine's cores" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        ranks = f", {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return f"{where}, {'fast' if self.fast else 'exact'} numerics{ranks}"

    @property
    def output_type(self) -> str:
        """Type of the matrix that makes logits."""
        return _OUTPUT_TYPES.get(self.weight_type, self.weight_type)


@runtime_checkable
class _KeepsStored(Protocol):
    def stored(self, name: str) -> Stored | None: ...


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads tensors by name onto a device."""

    weights: Weights
    setup: Setup

    def __contains__(self, name: str) -> bool:
        return name in self.weights

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in the type that a pass computes in."""
        return self._read(name)

    def _read(self, name: str) -> torch.Tensor:
        weights, device = self.weights, self.setup.device
        stored = weights.stored(name) if isinstance(weights, _KeepsStored) else None
        if stored is None:
            found = torch.as_tensor(weights[name]).to(device)
        elif isinstance(stored, RandomTensor):
            found = make_random(stored, device)
        elif isinstance(stored, KeepsHalves) and (halves := stored.halves()):
            kind, bits = halves
            found = torch.from_numpy(bits.view(np.int16)).view(_HALVES[kind]).to(device)
        else:
            found = torch.as_tensor(stored.read()).to(device)
        return found.to(self.setup.dtype)

    def optional(self, name: str) -> torch.Tensor | None:
        """Return a tensor, None if there is none of that name."""
        return self._read(name) if name in self.weights else None

    def part(self, name: str, dim: int | None = None) -> torch.Tensor | None:
        """Return a tensor, None if there is none of that name.

        dim: the dimension that ranks share, if there are several.
        """
        return self.optional(name)

    def shared(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return a tensor that every rank has."""
        return tensor

    def matrix(self, *names: str, dim: int | None = None) -> Matrix:
        """Return one matrix of several, side by side in their outputs, with their biases.

        dim: the dimension that ranks share: 0 outputs, 1 inputs; None: none.
        """
        found = [self.part(name, dim) for name in names]
        parts = [p for p in found if p is not None]
        assert len(parts) == len(found), "a matrix is missing"
        biases = [self.part(f"{name}_bias", None if dim == 1 else dim) for name in names]
        bias = None
        if any(b is not None for b in biases):
            whole = [p.new_zeros(len(p)) if b is None else b for p, b in zip(parts, biases, strict=True)]
            bias = torch.cat(whole)
        return self.packed(parts[0] if len(parts) == 1 else torch.cat(parts), self.setup.weight_type, bias)

    def packed(self, weight: torch.Tensor, weight_type: str, bias: torch.Tensor | None = None) -> Matrix:
        """Return a matrix [outputs, inputs] as products read it."""
        return pack_matrix(weight, weight_type, self.setup.dtype, self.setup.device, bias)


@dataclass(frozen=True, slots=True)
class RankReader(WeightReader):
    """Reads one rank's part of each tensor: rank 0 reads files and deals out parts.

    All ranks ask for the same tensors in the same order. Rank 0 alone has `weights`.
    """

    ranks: Dealer

    def shared(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return rank 0's tensor."""
        return self.ranks.share(tensor)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        found = self.optional(name)
        assert found is not None, f"{name} is missing"
        return found

    def optional(self, name: str) -> torch.Tensor | None:
        """Return a whole tensor, None if there is none of that name."""
        return self.ranks.share(WeightReader.optional(self, name))

    def part(self, name: str, dim: int | None = None) -> torch.Tensor | None:
        """Return this rank's part of a tensor."""
        if dim is None:
            return self.optional(name)
        whole = WeightReader.optional(self, name)
        return self.ranks.deal(None if whole is None else whole.chunk(self.ranks.size, dim))

    def matrix(self, *names: str, dim: int | None = None) -> Matrix:
        """Return this rank's part of one matrix of several."""
        packed = WeightReader.matrix(self, *names, dim=dim)
        return replace(packed, segment=segment_of_part(packed.shape, dim, self.ranks.size))

    def output_part(self, whole: torch.Tensor | None) -> Matrix:
        """Return this rank's rows of an output matrix [vocab, width], the last of them padded.

        whole: the matrix, at rank 0 only.
        """
        size = self.ranks.size
        if whole is not None:
            whole = functional.pad(whole, (0, 0, 0, -len(whole) % size))
        part = self.ranks.deal(None if whole is None else whole.chunk(size))
        assert part is not None
        packed = self.packed(part, self.setup.output_type)
        return replace(packed, segment=segment_of_part(packed.shape, 0, size))


def make_random(stored: RandomTensor, device: torch.device) -> torch.Tensor:
    """Return a random tensor in float32, the same numbers as `RandomTensor.read`."""
    width = stored.shape[-1]
    num_rows = stored.shape[0] if len(stored.shape) == 2 else 1
    columns = _mixed(torch.arange(width, device=device) ^ stored.key)
    values = torch.empty(num_rows, width, dtype=torch.float32, device=device)
    step = max(1, _RANDOM_NUMBERS // width)
    for first in range(0, num_rows, step):
        rows = torch.arange(first, min(first + step, num_rows), device=device) * ROW_STEP & MASK
        words = _mixed((columns + rows[:, None]) & MASK)
        values[first : first + step] = (words.to(torch.float64) - HALF) * (stored.spread / HALF) + stored.center
    return values.view(stored.shape)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Return the hash of 32-bit words that `shapes.mixed` is. int64 in and out."""
    a, m, b, n, c = MIX
    words = ((words ^ (words >> a)) * m) & MASK
    words = ((words ^ (words >> b)) * n) & MASK
    return words ^ (words >> c)


def matrix_rows(matrix: Matrix, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return some rows [n, inputs] of a matrix, not of four bits, as numbers."""
    if matrix.scale is None:
        return matrix.data[rows].to(dtype)
    picked = matrix.data.view(torch.uint8)[rows].view(matrix.data.dtype)
    return (picked.to(torch.float32) * matrix.scale[rows][:, None]).to(dtype)


def first_rows(matrix: Matrix, num_rows: int) -> Matrix:
    """Return the first rows of a matrix that is not of four bits, shared."""
    scale = None if matrix.scale is None else matrix.scale[:num_rows]
    shape = num_rows, matrix.shape[1]
    return replace(matrix, data=matrix.data[:num_rows], scale=scale, shape=shape)


def num_bytes(parts: Sequence[Matrix | torch.Tensor | None]) -> int:
    """Return the bytes of matrices and tensors, each counted once."""
    return sum({id(p): p.nbytes for p in parts if p is not None}.values())
