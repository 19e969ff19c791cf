"""Messages from rank 0 to the other ranks of a GPU's executor.

A message says what comes, and of what shape. The tensors themselves go through the ranks' process group.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct

from paceline.backend.cuda.ranks import Operation, as_bytes
from paceline.backend.cuda.rowwise import Activation
from paceline.backend.rank_processes import Name, Number, RankMessage, Size

if TYPE_CHECKING:
    from collections.abc import Sequence

PIECE_BYTES = 8  # joined tensors begin at multiples of this


class TensorShape(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Shape and type of a tensor that is sent next."""

    dtype: Name
    shape: Annotated[tuple[Number, ...], Meta(max_length=8)]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorShape:
        """Return shape and type of a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """PyTorch's type."""
        found = getattr(torch, self.dtype, None)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.torch_dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a tensor of this kind, to be filled."""
        return torch.empty(self.shape, dtype=self.torch_dtype, device=device)


def joined(pieces: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the bytes of tensors in one tensor. None takes none.

    Each begins at a multiple of eight bytes. Tensors that kernels want aligned to sixteen bytes come first: states
    of real models, whose rows are multiples of sixteen bytes.
    """
    parts = []
    for piece in pieces:
        if piece is not None:
            parts.append(as_bytes(piece))
            if extra := -len(parts[-1]) % PIECE_BYTES:
                parts.append(parts[-1].new_zeros(extra))
    return torch.cat(parts)


def split_pieces(whole: torch.Tensor, kinds: Sequence[TensorShape | None]) -> list[Any]:
    """Return the tensors that were joined."""
    found: list[Any] = []
    start = 0
    for kind in kinds:
        if kind is None:
            found.append(None)
            continue
        found.append(whole[start : start + kind.nbytes].view(kind.torch_dtype).view(kind.shape))
        start += aligned_bytes(kind)
    return found


def aligned_bytes(kind: TensorShape | None) -> int:
    """Return the bytes that a tensor takes among joined tensors."""
    return 0 if kind is None else -(-kind.nbytes // PIECE_BYTES) * PIECE_BYTES


# To other ranks -------------------------------------------------------------------------------------


class BeginRank(RankMessage, frozen=True):
    """The first message: where to run. Answered."""

    rank: Size
    device: Name
    threads: Size
    timeout_s: float  # longest time of one exchange


class JoinGroup(RankMessage, frozen=True):
    """Meet the first `size` ranks in a process group. Answered before and after."""

    size: Size
    store: Name  # file at which they meet


class NewStack(RankMessage, frozen=True):
    """Take a share of some layers, which rank 0 deals out. Answered."""

    number: Number
    size: Size  # ranks that share the stack
    weight_type: Name
    kv_type: Name
    fast: bool
    num_heads: Size  # heads of one rank
    num_kv_heads: Size
    head_dim: Size
    eps: float
    query_scale: float
    activation: Activation
    windows: Annotated[tuple[Number, ...], Meta(max_length=4096)]  # window of each layer
    output: bool  # True: also rows of an output matrix


class TakeTensor(RankMessage, frozen=True):
    """Take the tensor that is sent next, whole or this rank's part."""

    kind: TensorShape | None  # None: there is none of that name


class NewKV(RankMessage, frozen=True):
    """Make a store for the first layers of a stack. Answered."""

    stack: Number
    number: Number
    num_pages: Size
    num_layers: Size


class FollowPass(RankMessage, frozen=True):
    """A pass, or a part of one; see `Lead.together`."""

    operation: Operation
    stack: Number
    kinds: Annotated[tuple[TensorShape | None, ...], Meta(max_length=9)]  # of the pieces that come, see `joined`
    kv: Number = 0
    num_layers: Number = 0


class BeginGraph(RankMessage, frozen=True):
    """Capture what follows as a graph."""

    number: Number


class EndGraph(RankMessage, frozen=True):
    """The graph is whole."""


class ReplayGraph(RankMessage, frozen=True):
    """Replay a graph."""

    number: Number


class DropNumbers(RankMessage, frozen=True):
    """Forget stacks, stores and graphs."""

    numbers: tuple[Number, ...]


ToRank = (
    BeginRank
    | JoinGroup
    | NewStack
    | TakeTensor
    | NewKV
    | FollowPass
    | BeginGraph
    | EndGraph
    | ReplayGraph
    | DropNumbers
)

decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
