"""Matrices of the `native` backend: mapped from the cache, or packed now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from paceline import kernels
from paceline.backend.native.decoder import as_float32
from paceline.backend.registry import FILE
from paceline.core.system import available_bytes
from paceline.model.config import tensor_shapes
from paceline.model.experts import ROUTER_NAMES
from paceline.model.files.packed_cache import Packing
from paceline.model.files.packed_file import Wanted
from paceline.model.weights import LazyWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig
    from paceline.model.files.packed_file import PackedFile
    from paceline.model.files.stored import FourBit

    Weights = Mapping[str, NDArray[floating]]
    PackedLayer = tuple[dict[str, kernels.Matrix], dict[str, NDArray[float32]]]  # matrices, vectors


@runtime_checkable
class _KeepsBlocks(Protocol):
    def four_bit(self, name: str) -> FourBit | None: ...


@runtime_checkable
class _KnowsKinds(Protocol):
    def kind(self, name: str) -> str | None: ...


class MappedWeights(Mapping[str, "NDArray[floating]"]):
    """Weights whose matrices, but no other tensors, lie packed in a mapped file."""

    def __init__(self, weights: Weights, file: PackedFile) -> None:
        self.file = file
        self._weights = weights

    def __getitem__(self, name: str) -> NDArray[floating]:
        return self._weights[name]

    def kind(self, name: str) -> str | None:
        """Return how a tensor's own file stores it."""
        return self._weights.kind(name) if isinstance(self._weights, _KnowsKinds) else None

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def kept(weights: Weights, wanted: Mapping[str, Wanted], team: kernels.ThreadPool) -> Weights:
    """Return weights with matrices mapped from their cache, if they have one."""
    if not isinstance(weights, LazyWeights) or weights.cache is None:
        return weights
    types = sorted({one.dtype for one in wanted.values()})
    about = {"model": weights.label, "types": ", ".join(types), "isa": kernels.isa()}
    recipe = Packing(weights.sources, wanted, partial(pack, weights, team=team), about)
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
    """Return a packed matrix: the mapped one, else made now.

    It is made row by row from the file's blocks if possible.
    """
    weight_type = matrix_type(weights, name, weight_type)
    if isinstance(weights, MappedWeights) and (mapped := weights.file.matrix(name, weight_type)):
        return mapped
    blocks = weights.four_bit(name) if weight_type == "int4" and isinstance(weights, _KeepsBlocks) else None
    if blocks is not None:  # blocks of 32 numbers, whose values are kept
        return kernels.pack_int4(blocks.values, blocks.scales.view(np.uint16), blocks.minima.view(np.uint16))
    raw = weights.raw(name) if isinstance(weights, LazyWeights) else None
    if raw is None or (raw.kind != weight_type and raw.kind not in _block_names()):
        return kernels.pack(as_float32(weights[name]), weight_type)
    num_outputs, num_inputs = raw.shape
    return kernels.pack_blocks(team, raw.data, raw.kind, num_outputs, num_inputs, weight_type)


# Types --------------------------------------------------------------------------------------------

_EXACT = {"Q4_0": "int4", "Q4_1": "int4", "BF16": "bf16"}  # kind in a file -> type that holds its values exactly
_READ_ALIKE = (("attn_q", "attn_k", "attn_v"), ("mlp_gate", "mlp_up"), ("gate", "up"))  # these share activations
ROUTER_TYPE = "f32"  # a rounded router would choose other experts; it is small
_MIN_SHARE = 0.5  # least share of weights in kinds that kernels take, for `auto` to keep them
_INT8_SHARE = 0.5  # most free memory that int8 may take for `auto` to choose it, on cores with tiles


def matrix_type(weights: Weights, name: str, weight_type: str) -> str:
    """Return the kernels' type of a matrix for a type of weights.

    Matrices that read the same activations become float32 if their kinds cannot share activations.
    """
    prefix, _, short = name.rpartition(".")
    if short in ROUTER_NAMES:
        return ROUTER_TYPE
    if weight_type != FILE:
        return weight_type
    beside = next((group for group in _READ_ALIKE if short in group), (short,))
    own = _kept_type(weights, name)
    others = [f"{prefix}.{other}" for other in beside] if prefix else []
    types = {_kept_type(weights, other) for other in others if other in weights} or {own}
    return own if types <= kept_kinds() or len(types) == 1 else "f32"


def _kept_type(weights: Weights, name: str) -> str:
    kind = weights.kind(name) if isinstance(weights, _KnowsKinds) else None
    return kind if kind in kept_kinds() else _EXACT.get(kind or "", "f32")


@lru_cache
def kept_kinds() -> frozenset[str]:
    """Return the kinds of a file's blocks that kernels multiply as they are."""
    return frozenset(kernels.kept_names())


def choose_weights(config: ModelConfig, weights: Weights) -> tuple[str, str]:
    """Return the type of weights for `auto`, and why."""
    if not isinstance(weights, _KnowsKinds):
        return "int8", "the numbers come from no file"
    shapes = {name: prod(shape) for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    kinds = Counter[str]()
    for name, count in shapes.items():
        kinds[weights.kind(name) or "numbers"] += count
    most = kinds.most_common(1)[0][0]
    if sum(kinds[kind] for kind in kept_kinds()) < _MIN_SHARE * sum(shapes.values()):
        return "int8", f"the file is mostly {most}, which kernels do not keep"
    if kernels.isa() == "amx" and sum(shapes.values()) < _INT8_SHARE * available_bytes():
        return (
            "int8",
            f"the file is mostly {most}, but tiles (AMX) read prompts faster in int8, and memory suffices",
        )
    return FILE, f"the file is mostly {most}, kept as it is"


@lru_cache
def _block_names() -> frozenset[str]:
    return frozenset(kernels.block_names())
