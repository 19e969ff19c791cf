"""Shares that ranks on cores have of layers, and what rank 0 tells them.

A rank has rows of every packed matrix, in one piece of memory. Every product is split by its outputs, and each
rank reads whole rows of activations. So every number comes from the same sum as with one rank, whatever the
type of weights, and no sum goes across ranks.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from paceline import kernels
from paceline.backend.rank_processes import MAX_MESSAGE_BYTES, Name, Number, RankMessage, Size
from paceline.model.files.packed_file import ALIGNMENT, ROOM_BEHIND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float32, uint8
    from numpy.typing import NDArray

    from paceline.backend.native.packing import PackedLayer
    from paceline.model.files.packed_file import Wanted

    WantedLayer = dict[str, Wanted]
    Tables = dict[str, NDArray[float32]]

_SHARED_VECTORS = ("_bias", "_sinks")  # ends of names: one number per row or head, not per column
Ids = Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]  # int64


# Messages -----------------------------------------------------------------------------------------


class PlacedMatrix(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A rank's rows of a packed matrix."""

    dtype: Name
    num_outputs: Size
    num_inputs: Size
    starts: Annotated[tuple[Number, ...], Meta(min_length=2, max_length=2)]  # where its buffers begin


class PlacedVector(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A vector of float32."""

    start: Number
    length: Number


class PlacedLayer(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A rank's share of a layer, by short names."""

    matrices: dict[str, PlacedMatrix]
    vectors: dict[str, PlacedVector]


class BeginShare(RankMessage, frozen=True):
    """The first message: a rank's cores, and the layers that it shares. Answered."""

    rank: Size
    size: Size
    cores: Annotated[tuple[Number, ...], Meta(max_length=4096)]
    threads: Size
    kv_type: Name
    weight_bytes: Size  # bytes of the file of weights
    settings: dict[str, Any]  # settings of `kernels.Decoder`, which checks them
    tables: dict[str, PlacedVector]  # angles of RoPE
    layers: Annotated[tuple[PlacedLayer, ...], Meta(max_length=4096)]


class NewStore(RankMessage, frozen=True):
    """Make a store for the first layers. Answered."""

    number: Number
    num_pages: Size
    num_layers: Size


class FollowRows(RankMessage, frozen=True):
    """A pass over these tokens, see `Packed`."""

    kv: Number
    num_layers: Number
    token_ids: Ids
    positions: Ids
    slots: Ids
    cu_len: Ids
    pages: Ids
    first_keys: Ids


class DropStores(RankMessage, frozen=True):
    """Forget stores."""

    numbers: tuple[Number, ...]


ToRank = BeginShare | NewStore | FollowRows | DropStores

decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode


# Memory -------------------------------------------------------------------------------------------


class ShareLayout(NamedTuple):
    """Places of things in a rank's memory, the same for every rank."""

    num_ranks: int
    layers: tuple[PlacedLayer, ...]
    tables: dict[str, PlacedVector]
    num_bytes: int


def lay_out(
    layers: Sequence[PackedLayer], wanted: Sequence[WantedLayer], tables: Tables, num_ranks: int
) -> ShareLayout:
    """Lay out the share of a rank. wanted: type and shape of each layer's matrices."""
    end = 0

    def place(num_bytes: int) -> int:
        nonlocal end
        start, end = end, end + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return start

    def matrix(whole: kernels.Matrix, one: Wanted) -> PlacedMatrix:
        starts = tuple(place(len(buffer) // num_ranks) for buffer in kernels.buffers(whole))
        return PlacedMatrix(one.dtype, one.out // num_ranks, one.width, starts)

    def vector(name: str, whole: NDArray[float32]) -> PlacedVector:
        length = len(whole) // num_ranks if name.endswith(_SHARED_VECTORS) else len(whole)
        return PlacedVector(place(4 * length), length)

    placed = tuple(
        PlacedLayer(
            {name: matrix(one, kinds[name]) for name, one in matrices.items()},
            {name: vector(name, one) for name, one in vectors.items()},
        )
        for (matrices, vectors), kinds in zip(layers, wanted, strict=True)
    )
    flat = {name: PlacedVector(place(table.nbytes), table.size) for name, table in tables.items()}
    return ShareLayout(num_ranks, placed, flat, end + ROOM_BEHIND)


def write_share(
    memory: NDArray[uint8], layout: ShareLayout, layers: Sequence[PackedLayer], tables: Tables, rank: int
) -> None:
    """Write a rank's share to memory [num_bytes].

    Rows of a matrix lie in panels, so a share is one piece.
    """

    def put(start: int, data: NDArray[uint8]) -> None:
        memory[start : start + len(data)] = data

    for placed, (matrices, vectors) in zip(layout.layers, layers, strict=True):
        for name, where in placed.matrices.items():
            for start, buffer in zip(where.starts, kernels.buffers(matrices[name]), strict=True):
                length = len(buffer) // layout.num_ranks
                put(start, buffer[rank * length : (rank + 1) * length])
        for name, spot in placed.vectors.items():
            first = rank * spot.length if name.endswith(_SHARED_VECTORS) else 0
            put(spot.start, vectors[name][first : first + spot.length].view(np.uint8))
    for name, spot in layout.tables.items():
        put(spot.start, np.ascontiguousarray(tables[name]).reshape(-1).view(np.uint8))


def own_memory(num_bytes: int) -> NDArray[uint8]:
    """Return page-aligned zeros: each page lies near the cores that first write it."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def layers_in(memory: NDArray[uint8], layers: Sequence[PlacedLayer]) -> list[PackedLayer]:
    """Return the layers that lie in memory."""
    return [
        (
            {
                name: kernels.matrix_over(memory, one.dtype, one.num_outputs, one.num_inputs, list(one.starts))
                for name, one in placed.matrices.items()
            },
            {name: vector_in(memory, spot) for name, spot in placed.vectors.items()},
        )
        for placed in layers
    ]


def vector_in(memory: NDArray[uint8], spot: PlacedVector) -> NDArray[float32]:
    """Return a vector that lies in memory."""
    return memory[spot.start : spot.start + 4 * spot.length].view(np.float32)
