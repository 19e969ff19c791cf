"""Packing of matrices for the `native` backend: mapped from the cache, or made from the model's files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from paceline import kernels
from paceline.backend.native.decoder import as_float32
from paceline.model.files.packed_cache import Recipe
from paceline.model.files.packed_file import Wanted
from paceline.model.weights import LazyWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.model.files.gguf_file import FourBit
    from paceline.model.files.packed_file import PackedFile

    Weights = Mapping[str, NDArray[floating]]
    PackedLayer = tuple[dict[str, kernels.Matrix], dict[str, NDArray[float32]]]  # matrices, vectors


@runtime_checkable
class _KeepsBlocks(Protocol):
    def four_bit(self, name: str) -> FourBit | None: ...


class MappedWeights(Mapping[str, "NDArray[floating]"]):
    """Weights whose matrices lie packed in a mapped file; other tensors are read from their own."""

    def __init__(self, weights: Weights, file: PackedFile) -> None:
        self.file = file
        self._weights = weights

    def __getitem__(self, name: str) -> NDArray[floating]:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def kept(weights: Weights, wanted: Mapping[str, Wanted], team: kernels.ThreadPool) -> Weights:
    """Return weights with the wanted matrices mapped from their cache; as they are if they have none."""
    if not isinstance(weights, LazyWeights) or weights.cache is None:
        return weights
    types = sorted({one.dtype for one in wanted.values()})
    about = {"model": weights.label, "types": ", ".join(types), "isa": kernels.isa()}
    recipe = Recipe(weights.sources, wanted, partial(pack, weights, team=team), about)
    file = weights.cache.opened(recipe, team, weights.progress)
    return weights if file is None else MappedWeights(weights, file)


def pack_layer(
    index: int,
    shapes: Mapping[str, tuple[int, ...]],
    weights: Weights,
    weight_type: str,
    team: kernels.ThreadPool,
) -> PackedLayer:
    """Return one layer's packed matrices and its vectors. shapes: of its tensors, by short name."""
    prefix = f"layers.{index}."
    return (
        {n: pack(weights, prefix + n, weight_type, team) for n, shape in shapes.items() if len(shape) == 2},
        {n: as_float32(weights[prefix + n]) for n, shape in shapes.items() if len(shape) == 1},
    )


def pack(weights: Weights, name: str, weight_type: str, team: kernels.ThreadPool) -> kernels.Matrix:
    """Return a packed matrix: the mapped one, else made now, row by row from the file's blocks if possible."""
    if isinstance(weights, MappedWeights) and (mapped := weights.file.matrix(name, weight_type)):
        return mapped
    blocks = weights.four_bit(name) if weight_type == "int4" and isinstance(weights, _KeepsBlocks) else None
    if blocks is not None:  # of 32, whose values are kept
        return kernels.pack_int4(blocks.values, blocks.scales.view(np.uint16), blocks.minima.view(np.uint16))
    raw = weights.raw(name) if isinstance(weights, LazyWeights) else None
    if raw is None or raw.kind not in _block_names():
        return kernels.pack(as_float32(weights[name]), weight_type)
    return kernels.pack_blocks(team, raw.data, raw.kind, *raw.shape, weight_type)


@lru_cache
def _block_names() -> frozenset[str]:
    return frozenset(kernels.block_names())
