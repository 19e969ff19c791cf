"""Rank 0's side of tensor parallelism: the other ranks' processes, and what they are told.

A pool has a process for every rank but 0, each on the next device. Executors on one device share a pool, so that a
draft model may have fewer ranks than its target. A rank that ends, or does not answer in time, ends the pool:
everything that was shared is lost, so the engine ends with a message and is started anew.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from threading import RLock, Thread
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch

from paceline.backend.cuda.device_weights import RankReader
from paceline.backend.cuda.layers import LayerShape
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
    TensorShape,
    joined,
)
from paceline.backend.cuda.rank_process import make_group
from paceline.backend.cuda.ranks import FOLLOWERS, ONE_RANK, Followed, GroupRanks, check_shares
from paceline.backend.rank_processes import ENDED_S, LineEnded, RankProcess, encode_message, end_all, watch
from paceline.core.errors import ConfigError, EngineDied, PacelineError
from paceline.core.system import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from weakref import ReferenceType

    from paceline.backend.cuda.device_weights import WeightReader
    from paceline.backend.cuda.rank_messages import ToRank
    from paceline.backend.cuda.ranks import Lead, Operation
    from paceline.model.config import ModelConfig

FLAG, DRAFT_FLAG = "--tensor-parallel", "--draft-tensor-parallel"
START_S = 180.0  # time for a process to import PyTorch and reach its device
LOAD_S = 600.0  # time for a rank to pack its share, or to make a store
EXCHANGE_S = 60.0  # time for the slowest rank of a pass to come to the same exchange
MODULE = "paceline.backend.cuda.rank_process"

log = logging.getLogger(__name__)
_pools: list[ReferenceType[RankPool]] = []


# Executors ----------------------------------------------------------------------------------------


def check_model(config: ModelConfig, num_ranks: int, what: str, flag: str = FLAG) -> None:
    """Raise `ConfigError` if ranks cannot share a model's layers evenly."""
    c = config
    counts = {"query_heads": c.num_heads, "KV_heads": c.num_kv_heads, "inner_columns": c.intermediate_size}
    check_shares(num_ranks, what, flag, **counts)


@contextmanager
def shared_stack(
    config: ModelConfig, reader: WeightReader, threads: int | None, *, output: bool = False
) -> Iterator[tuple[LayerShape, WeightReader, Lead | None]]:
    """Have all ranks load layers in this block; yield what rank 0 does it with.

    output: they load rows of the output matrix, too, behind the layers.
    """
    setup = reader.setup
    if setup.num_ranks == 1:
        yield LayerShape.of(config, fast=setup.fast, ranks=ONE_RANK), reader, None
        return
    lead = pool_on(setup.device, setup.num_ranks, threads).lead(setup.num_ranks)
    shape = LayerShape.of(config, fast=setup.fast, ranks=lead)
    message = NewStack(
        number=lead.number,
        size=lead.size,
        weight_type=setup.weight_type,
        kv_type=setup.kv_type,
        fast=setup.fast,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        eps=shape.eps,
        query_scale=shape.query_scale,
        activation=shape.activation,
        windows=tuple(config.windows),
        output=output,
    )
    with lead.pool.telling(lead.size, message, answered=True):
        yield shape, RankReader(reader.weights, setup, lead), lead


class LeadingRanks(GroupRanks):
    """Ranks of one executor, as rank 0 sees them; see `Lead`."""

    def __init__(self, pool: RankPool, group: Any, size: int) -> None:
        super().__init__(group, 0, size)
        self.pool = pool
        self.number = pool.new_number()  # number of the stack that they share
        finalize(self, pool.drop, self.number)

    # Loading -------------------------------------------------------------------------------------

    def share(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Give a tensor to every rank."""
        self._tell_tensor(tensor)
        if tensor is not None:
            tensor = tensor.contiguous()
            self.broadcast(tensor)
        return tensor

    def deal(self, parts: Sequence[torch.Tensor] | None) -> torch.Tensor | None:
        """Give each rank a part; return rank 0's."""
        self._tell_tensor(None if parts is None else parts[0])
        if parts is None:
            return None
        own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        self.scatter(parts, own)
        return own

    def _tell_tensor(self, tensor: torch.Tensor | None) -> None:
        self.pool.send(self.size, TakeTensor(None if tensor is None else TensorShape.of(tensor)))

    def new_kv(self, num_pages: int, num_layers: int) -> int:
        """Make the other ranks' parts of a store."""
        number = self.pool.new_number()
        with self.pool.telling(self.size, NewKV(self.number, number, num_pages, num_layers), answered=True):
            return number

    def drop_kv(self, number: int) -> None:
        """Have the other ranks drop their parts of a store."""
        self.pool.drop(number)

    @contextmanager
    def together(
        self, operation: Operation, pieces: Sequence[torch.Tensor | None], kv: int = 0, num_layers: int = 0
    ) -> Iterator[None]:
        """Have the other ranks do what rank 0 does in this block."""
        kinds = tuple(None if piece is None else TensorShape.of(piece) for piece in pieces)
        with self.pool.telling(self.size, FollowPass(operation, self.number, kinds, kv, num_layers), passes=1):
            self.broadcast(joined(pieces))
            yield


# Processes ----------------------------------------------------------------------------------------


class RankPool:
    """Processes of all ranks but 0, from one device on."""

    def __init__(
        self, device: torch.device, size: int, threads: int | None = None, timeout_s: float = EXCHANGE_S
    ) -> None:
        """Start the processes. threads: of each process, on hosts; None: an even share. Raises `PacelineError`."""
        self.device, self.size, self.lost = device, size, ""
        self._lock = RLock()  # passes of target and drafters may come from several threads
        self._next = 1
        self._dropped: list[int] = []  # numbers of things that other ranks may forget
        self._silent = False  # True: a graph is replayed, whose messages were sent when it was captured
        self._num_passes = 0  # passes that other ranks were told of
        self._num_begun = self._num_over = 0  # counts of exchanges without an answer
        self._groups: dict[int, Any] = {}
        self._timeout_s = timeout_s
        self.processes: list[RankProcess] = []
        self.close = finalize(self, end_all, self.processes)
        FOLLOWERS.add(self)
        share = threads or max(1, len(usable_cores()) // size)
        try:
            self.processes += (RankProcess(rank, MODULE) for rank in range(1, size))
            for one in self.processes:
                place = (
                    device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + one.rank)
                )
                one.line.send(encode_message(BeginRank(one.rank, str(place), share, timeout_s)))
            for one in self.processes:
                one.answer(START_S)
        except LineEnded:
            self.close()
            raise EngineDied(f"a rank ended before it began{self.processes[-1].how()}") from None
        except BaseException:
            self.close()
            raise
        leave = None if device.type == "cpu" else os._exit
        Thread(target=watch, args=(ref(self), leave), daemon=True, name="ranks-watch").start()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes, from rank 1 on."""
        return [one.process.pid for one in self.processes]

    @property
    def awaited(self) -> int | None:
        """Number of the exchange without an answer that is going on; None: there is none."""
        return self._num_begun + self._num_over if self._num_begun > self._num_over else None

    def new_number(self) -> int:
        """Return a number for a stack, a store or a graph."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def drop(self, number: int) -> None:
        """Have other ranks forget what a number means, before the next message."""
        self._dropped.append(number)  # no lock: things are freed anywhere, even while a message is sent

    def lead(self, size: int) -> LeadingRanks:
        """Return rank 0 of the first `size` ranks, for a new executor."""
        with self._lock:
            if size not in self._groups:
                self._groups[size] = self._join(size)
            return LeadingRanks(self, self._groups[size], size)

    def _join(self, size: int) -> Any:
        folder = tempfile.mkdtemp(prefix="paceline-ranks-")  # only this user may enter
        try:
            store = str(Path(folder) / "store")
            with self.telling(size, JoinGroup(size, store), answered=True):
                return make_group(store, 0, size, self.device, self._timeout_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # Messages ------------------------------------------------------------------------------------

    @contextmanager
    def telling(self, size: int, message: ToRank, *, answered: bool = False, passes: int = 0) -> Iterator[None]:
        """Send a message to the first `size` ranks; do what they do in this block.

        answered: they answer at the end. passes: that the message tells of. Raises `EngineDied` if a rank is lost,
        or what one says is wrong.
        """
        with self._lock:
            self._check()
            if self._silent:
                yield
                return
            self._num_begun += not answered
            try:
                self._send_dropped()
                self.send(size, message)
                self._num_passes += passes
                yield
                for one in self.processes[: size - 1] if answered else ():
                    one.answer(LOAD_S)
            except torch.OutOfMemoryError:
                self._lose("rank 0 has no memory left on its device")
                raise
            except (LineEnded, RuntimeError) as error:
                found = self._why(error)
                self._lose(str(found))
                raise found from error
            except BaseException as error:
                self._lose(f"rank 0 failed: {error}")
                raise
            finally:
                self._num_over += not answered

    def send(self, size: int, message: ToRank) -> None:
        """Send a message to the first `size` ranks. Raises `LineEnded`."""
        sent = encode_message(message)
        for one in self.processes[: size - 1]:
            one.line.send(sent)

    def _send_dropped(self) -> None:
        if self._dropped:
            numbers = tuple(self._dropped)
            del self._dropped[: len(numbers)]
            self.send(self.size, DropNumbers(numbers))

    def _check(self) -> None:
        if not self.close.alive:
            raise EngineDied(f"{self.lost or 'the ranks were ended'}; start the engine anew")

    def _lose(self, why: str) -> None:
        """End all ranks: what they hold together is lost."""
        if not self.lost:
            self.lost = why
            log.error("tensor parallel: %s", why)
        self.close()

    def _why(self, error: Exception) -> PacelineError:
        """Return what ended an exchange: a rank's error, its end, or its silence."""
        silent = {one.socket: one for one in self.processes}
        found: dict[str, PacelineError] = {}  # kind of trouble -> the first such error
        end_s = time.monotonic() + ENDED_S
        while silent and (left_s := end_s - time.monotonic()) > 0:
            for ready in select.select(list(silent), [], [], left_s)[0]:
                kind, what = silent.pop(ready).last_words()
                found.setdefault(kind, what)
        if silent and not found.keys() & {"user", "end", "bug"}:
            names = " and ".join(f"rank {one.rank}" for one in silent.values())
            return EngineDied(f"no answer of {names} within {self._timeout_s:g} s")
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return next((found[kind] for kind in ("user", "end", "bug") if kind in found), EngineDied(first))

    # Graphs --------------------------------------------------------------------------------------

    @contextmanager
    def capturing(self) -> Iterator[Followed]:
        """Have other ranks capture what follows, if anything does."""
        found, number, before = Followed(self), self.new_number(), self._num_passes
        if not self.close.alive:
            yield found
            return
        with self.telling(self.size, BeginGraph(number)):
            yield found
            self.send(self.size, EndGraph())
            if self._num_passes > before:
                found.number = number
                finalize(found, self.drop, number)
            else:
                self.drop(number)

    @contextmanager
    def replaying(self, number: int) -> Iterator[None]:
        """Have other ranks replay a graph; in this block rank 0 does."""
        with self.telling(self.size, ReplayGraph(number)):
            self._silent = True
            try:
                yield
            finally:
                self._silent = False


def pool_on(device: torch.device, size: int, threads: int | None = None) -> RankPool:
    """Return a pool of at least `size` ranks on a device. Raises `PacelineError`."""
    if device.type != "cpu":
        first, found = device.index or 0, torch.cuda.device_count()
        if first + size > found:
            raise ConfigError(
                f"{size} ranks from {device} on need {first + size} GPUs, and this machine has {found}"
            )
    living = [pool for one in _pools if (pool := one()) is not None and pool.close.alive]
    _pools[:] = map(ref, living)
    fits = [pool for pool in living if pool.device == device and pool.size >= size]
    if not fits:
        fits = [RankPool(device, size, threads)]
        _pools.append(ref(fits[0]))
    return fits[0]
