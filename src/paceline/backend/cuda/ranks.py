"""Ranks of a tensor-parallel executor, and the sums that go across them.

A rank is a process with a device of its own. It has a share of each layer: some KV heads with their query heads,
and some inner columns of the feed-forward network. So a rank computes its columns of queries, keys, values, gates
and ups. Two products of a layer need sums over all ranks: that of attention's output, and `down`. For these every
rank gathers all partial sums and adds them itself, in rank order: an all-reduce would choose its order by size.

Rank 0 is the engine's process (`rank_pool.py`). The others follow it (`rank_process.py`).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import WeakSet

import torch

from paceline.backend.cuda.products import Parts, multiply, partial_product
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from paceline.backend.cuda.matrix import Matrix
    from paceline.backend.cuda.products import Product

Operation = Literal["layers", "keys", "logits", "rows"]  # operations of a pass that ranks do together


class Ranks(Protocol):
    """Ranks of one executor, as one of them sees them."""

    rank: int
    size: int

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts [n, ...] of all ranks in order, [size n, ...]."""


class Dealer(Ranks, Protocol):
    """Ranks that load weights: rank 0 reads them and deals them out."""

    def share(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return rank 0's tensor at every rank, None if it has none; others give None."""

    def deal(self, parts: Sequence[torch.Tensor] | None) -> torch.Tensor | None:
        """Return the part that rank 0 has for each rank. All parts have one shape."""


class Lead(Ranks, Protocol):
    """Rank 0 of several."""

    def together(
        self, operation: Operation, pieces: Sequence[torch.Tensor | None], kv: int = 0, num_layers: int = 0
    ) -> AbstractContextManager[None]:
        """Have the other ranks do in this block what rank 0 does.

        pieces: tensors that it gives them. kv: number of a store. Operations are: layers, see `Stack.run`; keys,
        see `Stack.store`; logits, to multiply by the rows of the output matrix that a rank has, and collect; rows,
        to gather some of these.
        """

    def collect(self, part: torch.Tensor) -> torch.Tensor | None:
        """Return the parts of all ranks, [size, n, ...]; None at others than rank 0."""

    def new_kv(self, num_pages: int, num_layers: int) -> int:
        """Make the other ranks' parts of a store; return its number. Raises `ConfigError`."""

    def drop_kv(self, number: int) -> None:
        """Have the other ranks drop their parts of a store."""


class OneRank:
    """The only rank."""

    rank, size = 0, 1

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the part, which is the whole."""
        return part


ONE_RANK = OneRank()


class GroupRanks:
    """Ranks that exchange tensors through a process group, never objects: those would be pickled."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """group: a `ProcessGroup`: gloo's on hosts, NCCL's on GPUs."""
        self.rank, self.size = rank, size
        self._group = group

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts of all ranks in rank order."""
        whole = part.new_empty(self.size * len(part), *part.shape[1:])
        self._group._allgather_base(as_bytes(whole), as_bytes(part)).wait()
        return whole

    def collect(self, part: torch.Tensor) -> torch.Tensor | None:
        """Return the parts of all ranks at rank 0."""
        whole = part.new_empty(self.size, *part.shape) if self.rank == 0 else None
        outputs = [] if whole is None else [[as_bytes(one) for one in whole]]
        options = torch.distributed.GatherOptions()
        options.rootRank = 0
        self._group.gather(outputs, [as_bytes(part)], options).wait()
        return whole

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor by rank 0's."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([as_bytes(tensor)], options).wait()

    def scatter(self, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Overwrite a contiguous tensor by this rank's part. parts: at rank 0 only."""
        options = torch.distributed.ScatterOptions()
        options.rootRank = 0
        inputs = [[as_bytes(part) for part in parts]] if parts else []
        self._group.scatter([as_bytes(into)], inputs, options).wait()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, which every group exchanges, whatever the type. Copied if not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


# Graphs -------------------------------------------------------------------------------------------


class Followers(Protocol):
    """Ranks that follow this process."""

    def capturing(self) -> AbstractContextManager[Followed]:
        """Have them capture what they do in this block."""

    def replaying(self, number: int) -> AbstractContextManager[None]:
        """Have them replay a graph; in this block rank 0 does."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Followed:
    """Graph that followers have captured beside rank 0's."""

    followers: Followers
    number: int = 0  # number of the graph at followers; 0: they had nothing to do


FOLLOWERS: WeakSet[Followers] = WeakSet()  # all followers of this process


@contextmanager
def captured_together() -> Iterator[Sequence[Followed]]:
    """Have all followers capture what they do while rank 0 captures a graph."""
    with ExitStack() as together:
        yield [together.enter_context(followers.capturing()) for followers in FOLLOWERS]


@contextmanager
def replayed_together(captured: Sequence[Followed]) -> Iterator[None]:
    """Have followers replay their graphs; in this block rank 0 replays its own."""
    with ExitStack() as together:
        for one in captured:
            if one.number:
                together.enter_context(one.followers.replaying(one.number))
        yield


# Sums ---------------------------------------------------------------------------------------------


def summed_product(x: torch.Tensor, m: Matrix, ranks: Ranks, *, fast: bool = False) -> Product:
    """Return the product of tokens and a matrix whose K ranks share.

    x: [T, K / ranks]. m: [N, K / ranks], with the bias of the whole. The product's parts are the segments of all
    ranks, in order. Where a segment ends at each border of two ranks, segments and bits are those of one rank.
    """
    if ranks.size == 1:
        return multiply(x, m, fast=fast)
    sums = ranks.gather(partial_product(x, m))
    return Parts(sums, m.bias, x.dtype)


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """Add parts [n, ...] from the first on, in their own type."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


# Shares -------------------------------------------------------------------------------------------


def check_shares(size: int, what: str, flag: str, **counts: int) -> None:
    """Raise `ConfigError` if counts cannot be shared out evenly over ranks. what: that has them."""
    odd = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count % size]
    if odd:
        fits = [str(n) for n in range(1, size) if not any(count % n for count in counts.values())]
        raise ConfigError(
            f"{flag} {size}: {what} has {' and '.join(odd)}, which {size} ranks cannot share evenly; "
            f"take {' or '.join(fits)}"
        )
