"""A decoder on cores whose layers several processes share.

Each process is a rank, for example one per socket. Rank 0 is the engine's process; it has the tables of tokens and
the drafters. The other ranks follow its passes (`follower`). `shares` says what a rank has of a layer.
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from dataclasses import replace
from threading import RLock, Thread
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import numpy as np

from paceline import kernels
from paceline.backend.native import load
from paceline.backend.native.decoder import NativeDecoder
from paceline.backend.native.load import (
    Entry,
    Output,
    compile_decoder,
    pack_parts,
    rotations_of,
    settings_of,
    shared_team,
    turns,
)
from paceline.backend.native.shares import (
    BeginShare,
    DropStores,
    FollowRows,
    NewStore,
    lay_out,
    layers_in,
    own_memory,
    write_share,
)
from paceline.backend.rank_processes import LineEnded, RankProcess, encode_message, end_all, watch
from paceline.core.errors import ConfigError, EngineDied
from paceline.core.system import anonymous_memory, deal, places, usable_cores
from paceline.model.config import layer_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.native.load import PackedParts
    from paceline.backend.native.shares import ShareLayout, Tables, ToRank
    from paceline.backend.seam import Capabilities, PassRequest
    from paceline.model.config import ModelConfig

FLAG = "--tensor-parallel"
MODULE = "paceline.backend.native.follower"
PANEL = 32  # rows of a matrix that lie together
START_S = 120.0  # time for a process to start and copy its share
STORE_S = 60.0  # time for a rank to make a store
_ARRIVED, _ROUNDS = 0, 64  # indices of uint32 numbers in the memory, see `csrc/base/rank_memory.h`
# Features of `ModelConfig.needs` that read all heads or inner columns together, and experts: ranks lack them.
_UNSHARED = (
    "norms over all heads together",
    "a mixture of experts",
    "layers that share keys and values",
    "inputs of each layer",
)


def load_decoder(
    config: ModelConfig,
    weights: Mapping[str, NDArray[floating]],
    weight_type: str,
    kv_type: str,
    threads: int | None,
    device: Device | None = None,
    *,
    num_ranks: int = 1,
) -> NativeDecoder:
    """Make a decoder, see `LoadDecoder`. threads: of each rank; None: its share of the cores."""
    if num_ranks == 1:
        return load.load_decoder(config, weights, weight_type, kv_type, threads, device)
    check_shares(config, num_ranks)
    cores = usable_cores()
    groups = deal(num_ranks, cores, places(cores))
    team = shared_team(threads or len(groups[0]), groups[0])
    parts = pack_parts(config, weights, team, weight_type, kv_type)
    angles, sizes = turns(rotations_of(config), parts.factors)
    tables = {"inverse_frequencies": angles, "magnitudes": sizes}
    wanted = [
        {
            name: parts.wanted[f"layers.{i}.{name}"]
            for name, shape in layer_shapes(config, i).items()
            if len(shape) == 2
        }
        for i in range(config.num_layers)
    ]
    layout = lay_out(parts.layers, wanted, tables, num_ranks)
    ranks = CoreRanks(num_ranks)
    try:
        for rank in range(1, num_ranks):
            begin = BeginShare(
                rank,
                num_ranks,
                tuple(sorted(groups[rank])),
                threads or len(groups[rank]),
                kv_type,
                layout.num_bytes,
                settings_of(config, num_ranks),
                layout.tables,
                layout.layers,
            )
            ranks.start(begin, _share(layout, parts, tables, rank))
        ranks.answers(START_S)
    except BaseException:
        ranks.close()
        raise
    own = own_memory(layout.num_bytes)
    write_share(own, layout, parts.layers, tables, 0)
    compiled = compile_decoder(
        config,
        team,
        entry=Entry(parts.tables.embed),
        output=Output(parts.tables.head, parts.tables.final_norm),
        layers=layers_in(own, layout.layers),
        factors=parts.factors,
        ranks=ranks.memory,
    )
    return RankedDecoder(config, team, compiled, parts.tables, weight_type, kv_type, ranks=ranks)


def check_shares(config: ModelConfig, num_ranks: int) -> None:
    """Raise `ConfigError` for a model whose layers ranks cannot share evenly."""
    if found := [need for need in config.needs if need in _UNSHARED]:
        raise ConfigError(f"{FLAG} {num_ranks}: ranks on cores do not share {' or '.join(found)}; leave it out")
    for heads in {view.heads for view in config.views}:
        fits = [n for n in range(1, num_ranks + 1) if _fits(config, heads.num_kv, heads.dim, n)]
        if num_ranks not in fits:
            raise ConfigError(
                f"{FLAG} {num_ranks}: {config.num_heads} query heads, {heads.num_kv} KV heads of {heads.dim}, "
                f"{config.intermediate_size} inner columns and {config.hidden_size} states are not {num_ranks} "
                f"even shares of whole panels of {PANEL} rows; take {' or '.join(map(str, fits)) or 1}"
            )


def _fits(config: ModelConfig, num_kv: int, dim: int, num_ranks: int) -> bool:
    panels = (num_kv * dim, config.num_heads * dim, config.hidden_size, config.intermediate_size)
    return num_kv % num_ranks == 0 and not any(rows % (num_ranks * PANEL) for rows in panels)


def _share(layout: ShareLayout, parts: PackedParts, tables: Tables, rank: int) -> int:
    """Return a file with a rank's share."""
    file = anonymous_memory(layout.num_bytes)
    with mmap.mmap(file, layout.num_bytes) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        write_share(memory, layout, parts.layers, tables, rank)
        del memory
    return file


class CoreRanks:
    """Processes of all ranks but 0, and what they are told."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[RankProcess] = []
        self._file = anonymous_memory(kernels.RANK_MEMORY_BYTES)
        self.close = finalize(self, _end, self.processes, files := [self._file])
        self._files = files  # files that are open
        self.memory = kernels.RankMemory(self._file, 0, size)
        self._head = mmap.mmap(self._file, mmap.PAGESIZE)
        self._lock = RLock()
        self._next = 1
        self._dropped: list[int] = []  # numbers of stores that other ranks may forget

    @property
    def pids(self) -> list[int]:
        """Ids of the processes, from rank 1 on."""
        return [one.process.pid for one in self.processes]

    @property
    def awaited(self) -> int | None:
        """Number of the meeting at which some ranks wait for others; None: none waits."""
        arrived, rounds = (int.from_bytes(self._head[at : at + 4], sys.byteorder) for at in (_ARRIVED, _ROUNDS))
        return rounds if arrived else None

    def start(self, begin: BeginShare, share: int) -> None:
        """Start a rank's process. share: file of its weights, which is closed."""
        try:
            one = RankProcess(begin.rank, MODULE, self._file, share)
            self.processes.append(one)
            with suppress(LineEnded):  # `answers` tells why
                one.line.send(encode_message(begin))
        finally:
            os.close(share)

    def answers(self, timeout_s: float) -> None:
        """Wait until all ranks began. Raises the error of a rank that failed."""
        try:
            for one in self.processes:
                one.answer(timeout_s)
        finally:
            _close_files(self._files)
        Thread(target=watch, args=(ref(self), os._exit), daemon=True, name="ranks-watch").start()

    def new_kv(self, num_pages: int, num_layers: int) -> int:
        """Make the other ranks' parts of a store; return its number. Raises `PacelineError`."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self.tell(NewStore(number, num_pages, num_layers))
            for one in self.processes:
                one.answer(STORE_S)
            return number

    def drop_kv(self, number: int) -> None:
        """Have the other ranks forget a store, before the next message."""
        self._dropped.append(number)  # no lock: stores are freed anywhere, even while a message is sent

    def tell(self, message: ToRank) -> None:
        """Send a message to every rank. Raises `EngineDied` if one is gone."""
        with self._lock:
            sent = [encode_message(message)]
            if self._dropped:
                numbers = tuple(self._dropped)
                del self._dropped[: len(numbers)]
                sent.insert(0, encode_message(DropStores(numbers)))
            for one in self.processes:
                try:
                    for data in sent:
                        one.line.send(data)
                except LineEnded:
                    raise EngineDied(f"rank {one.rank} has ended{one.how()}; start the engine anew") from None


def _end(processes: list[RankProcess], files: list[int]) -> None:
    """End processes, and close the files of ranks that never began."""
    end_all(processes)
    _close_files(files)


def _close_files(files: list[int]) -> None:
    while files:
        os.close(files.pop())


class RankedKV(kernels.KVStore):
    """Rank 0's part of a store, and its number among ranks."""

    def __init__(
        self, kv_type: str, num_pages: int, heads: Sequence[tuple[int, int]], number: int, num_ranks: int
    ) -> None:
        super().__init__(kv_type, num_pages, heads)
        self.number, self.num_ranks = number, num_ranks

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all parts together: they lie in one memory."""
        return self.num_ranks * super().bytes_per_token


class RankedDecoder(NativeDecoder):
    """A decoder whose layers ranks share; results have the same bits as with one rank."""

    def __init__(self, *parts: Any, ranks: CoreRanks) -> None:
        super().__init__(*parts)
        self.ranks = ranks
        self.num_ranks = ranks.size

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{super().describe()}, {self.num_ranks} ranks"

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of one rank, without several steps in one call and pages that move."""
        return replace(super().capabilities, multi_step=False, moves_pages=False)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices of all ranks."""
        tables = {id(m): m.num_bytes for m in (self.tables.embed, self.tables.head)}
        of_tables = sum(tables.values())
        return of_tables + self.num_ranks * (self.compiled.weight_bytes - of_tables)

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> RankedKV:
        """Return an empty store, see `NativeDecoder.new_kv`; every rank has the keys of its heads."""
        heads = [(num_kv // self.num_ranks, dim) for num_kv, dim in self.config.kv_heads(num_layers)]
        number = self.ranks.new_kv(num_pages, num_layers or self.config.num_layers)
        kv = RankedKV(self.kv_type, num_pages, heads, number, self.num_ranks)
        finalize(kv, self.ranks.drop_kv, number)
        return kv

    def _lead(self, request: PassRequest) -> None:
        packed, kv = request.packed, request.kv
        assert isinstance(kv, RankedKV)
        assert not request.steps
        if not len(packed.token_ids):
            return
        first_keys = np.zeros(len(packed.pages), np.int64) if packed.first_keys is None else packed.first_keys
        arrays = (packed.token_ids, packed.positions, packed.slots, packed.cu_len, packed.pages, first_keys)
        self.ranks.tell(FollowRows(kv.number, self._num_layers(request), *(one.tobytes() for one in arrays)))
