"""Process of a rank beside rank 0: has a share of layers, follows every pass.

`rank_pool` starts it as `python -m paceline.backend.cuda.rank_process LINE`, the descriptor of its end of a line.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline.backend.cuda.device_memory import enough_memory, on_device
from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.device_weights import RankReader, Setup
from paceline.backend.cuda.graphs import recorded
from paceline.backend.cuda.layers import LayerShape, Stack, read_stack
from paceline.backend.cuda.output_matrix import own_rows, wide_product
from paceline.backend.cuda.rank_messages import (
    BeginGraph,
    BeginRank,
    DropNumbers,
    EndGraph,
    FollowPass,
    JoinGroup,
    NewKV,
    NewStack,
    ReplayGraph,
    TakeTensor,
    aligned_bytes,
    decode_to_rank,
    split_pieces,
)
from paceline.backend.cuda.ranks import GroupRanks
from paceline.backend.rank_processes import RankReady, encode_message, serve_rank, trouble_told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.backend.cuda.kv_store import DeviceKV
    from paceline.backend.cuda.matrix import Matrix
    from paceline.backend.cuda.rank_messages import ToRank
    from paceline.backend.rank_processes import RankLine

    Replayed = Callable[[], object]

log = logging.getLogger(__name__)


def make_group(store_path: str, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """Meet the other ranks at a file, and exchange a first tensor. Raises `RuntimeError`.

    Processes of one machine: gloo listens on the loopback address only.
    """
    distributed: Any = torch.distributed
    store = distributed.FileStore(store_path, size)
    if device.type == "cpu":
        kind = distributed.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname="127.0.0.1")]
    else:
        kind = distributed.ProcessGroupNCCL
        options = kind.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = kind(store, rank, size, options)
    GroupRanks(group, rank, size).broadcast(torch.zeros(16, device=device))
    return group


class FollowingRanks(GroupRanks):
    """Ranks of an executor, as a rank other than 0 sees them."""

    def __init__(
        self, group: Any, rank: int, size: int, device: torch.device, take: Callable[[], TakeTensor]
    ) -> None:
        """take: waits for the message that tells of the next tensor."""
        super().__init__(group, rank, size)
        self._device, self._take = device, take

    def share(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return rank 0's tensor."""
        if (kind := self._take().kind) is None:
            return None
        found = kind.empty(self._device)
        self.broadcast(found)
        return found

    def deal(self, parts: Sequence[torch.Tensor] | None) -> torch.Tensor | None:
        """Return this rank's part of those that rank 0 deals out."""
        if (kind := self._take().kind) is None:
            return None
        found = kind.empty(self._device)
        self.scatter((), found)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class HostedStack:
    """A rank's share of an executor."""

    stack: Stack
    ranks: FollowingRanks
    output: Matrix | None  # its rows of the output matrix


class RankHost:
    """Shares, stores and graphs of a rank, and what it does for each message."""

    def __init__(self, line: RankLine, begin: BeginRank) -> None:
        self._line, self._begin = line, begin
        self._device = torch.device(begin.device)
        self._groups: dict[int, FollowingRanks] = {}  # by number of ranks
        self._stacks: dict[int, HostedStack] = {}
        self._stores: dict[int, DeviceKV] = {}
        self._graphs: dict[int, Replayed] = {}
        self._capture: Capture | None = None  # a graph that is being captured
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            JoinGroup: self._join,
            NewStack: self._new_stack,
            NewKV: self._new_kv,
            FollowPass: self._follow_pass,
            BeginGraph: self._begin_graph,
            EndGraph: self._end_graph,
            ReplayGraph: self._replay,
            DropNumbers: self._drop,
        }
        self._operations: Mapping[str, Callable[[HostedStack, FollowPass, Sequence[Any]], None]] = {
            "layers": self._run_layers,
            "keys": self._store_keys,
            "logits": self._multiply,
            "rows": self._gather_rows,
        }

    def serve(self) -> None:
        """Follow rank 0. Raises `LineEnded` when it is gone."""
        while True:
            message = decode_to_rank(self._line.receive())
            self.follow(message)

    def follow(self, message: ToRank) -> None:
        """Obey a message; note it if a graph is being captured."""
        if self._capture is not None and not isinstance(message, EndGraph):
            self._capture.messages.append(message)
        self._handlers[type(message)](message)

    def _answer(self) -> None:
        self._line.send(encode_message(RankReady()))

    def _join(self, message: JoinGroup) -> None:
        rank, size = self._begin.rank, message.size
        group = make_group(message.store, rank, size, self._device, self._begin.timeout_s)
        self._groups[size] = FollowingRanks(group, rank, size, self._device, self._take)
        self._answer()

    def _take(self) -> TakeTensor:
        message = decode_to_rank(self._line.receive())
        assert isinstance(message, TakeTensor), "rank 0 loads something else"
        return message

    # Shares and stores ---------------------------------------------------------------------------

    def _new_stack(self, m: NewStack) -> None:
        ranks = self._groups[m.size]
        setup = Setup(self._device, m.weight_type, m.kv_type, m.fast, m.size)
        shape = LayerShape(
            m.num_heads,
            m.num_kv_heads,
            m.head_dim,
            m.eps,
            m.query_scale,
            m.activation,
            m.fast,
            ranks,
        )
        reader = RankReader({}, setup, ranks)
        with enough_memory("its share of the weights"):
            stack = read_stack(reader, shape, m.windows, {})
            output = reader.output_part(None) if m.output else None
        self._stacks[m.number] = HostedStack(stack, ranks, output)
        self._answer()

    def _new_kv(self, m: NewKV) -> None:
        with enough_memory("its part of the KV"):
            self._stores[m.number] = self._stacks[m.stack].stack.new_kv(m.num_pages, m.num_layers)
        self._answer()

    def _drop(self, message: DropNumbers) -> None:
        for number in message.numbers:
            for table in (self._stacks, self._stores, self._graphs):
                table.pop(number, None)

    # Passes --------------------------------------------------------------------------------------

    def _follow_pass(self, m: FollowPass) -> None:
        hosted = self._stacks[m.stack]
        whole = torch.empty(sum(map(aligned_bytes, m.kinds)), dtype=torch.uint8, device=self._device)
        hosted.ranks.broadcast(whole)
        self._operations[m.operation](hosted, m, split_pieces(whole, m.kinds))

    def _run_layers(self, hosted: HostedStack, m: FollowPass, pieces: Sequence[Any]) -> None:
        read, residual, positions, *places = pieces
        tokens = DevicePass(positions, positions, *places)  # only rank 0 knows the token ids
        hosted.stack.run(tokens, self._stores[m.kv], read, residual, m.num_layers)

    def _store_keys(self, hosted: HostedStack, m: FollowPass, pieces: Sequence[Any]) -> None:
        read, positions, slots = pieces
        nothing = positions[:0]  # no token attends to others
        tokens = DevicePass(positions, positions, slots, nothing, nothing, nothing)
        hosted.stack.store(tokens, self._stores[m.kv], read)

    def _multiply(self, hosted: HostedStack, _: FollowPass, pieces: Sequence[Any]) -> None:
        assert hosted.output is not None
        hosted.ranks.collect(wide_product(pieces[0], hosted.output))

    def _gather_rows(self, hosted: HostedStack, _: FollowPass, pieces: Sequence[Any]) -> None:
        assert hosted.output is not None
        hosted.ranks.gather(own_rows(hosted.output, pieces[0], hosted.ranks.rank)[None])

    # Graphs --------------------------------------------------------------------------------------

    def _begin_graph(self, message: BeginGraph) -> None:
        self._capture = Capture(message.number, self._device)

    def _end_graph(self, _: EndGraph) -> None:
        assert self._capture is not None
        done, self._capture = self._capture, None
        self._graphs[done.number] = done.end(self.follow)

    def _replay(self, message: ReplayGraph) -> None:
        self._graphs[message.number]()


class Capture:
    """A graph that is being captured; on a host, messages to be followed again."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number = number
        self.messages: list[ToRank] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._within = ExitStack()
        if device.type != "cpu":
            self._graph = torch.cuda.CUDAGraph()
            self._within.enter_context(recorded(self._graph, device))

    def end(self, follow: Callable[[ToRank], None]) -> Replayed:
        """End the capture; return what replays it."""
        self._within.close()
        if self._graph is not None:
            return self._graph.replay
        return partial(_follow_all, follow, tuple(self.messages))


def _follow_all(follow: Callable[[ToRank], None], messages: Sequence[ToRank]) -> None:
    for message in messages:
        follow(message)


def run(line: RankLine) -> None:
    """Serve one rank 0 until it is gone. Raises `LineEnded` then."""
    begin = decode_to_rank(line.receive())
    assert isinstance(begin, BeginRank), "the first message says where to run"
    with trouble_told(line, begin.rank):
        device = torch.device(begin.device)
        if device.type == "cpu":
            torch.set_num_threads(begin.threads)
        torch.empty(0, device=device)
        host = RankHost(line, begin)
        line.send(encode_message(RankReady()))
        with on_device(device), torch.inference_mode():
            host.serve()


if __name__ == "__main__":
    serve_rank(run)
