"""Process of a rank beside rank 0: shares every layer, follows every pass.

`ranked` starts it as `python -m paceline.backend.native.follower LINE MEMORY WEIGHTS`. These are descriptors: of
its end of a line, of the memory that ranks share, and of its weights.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.native.shares import (
    BeginShare,
    DropStores,
    FollowRows,
    NewStore,
    decode_to_rank,
    layers_in,
    own_memory,
    vector_in,
)
from paceline.backend.rank_processes import RankReady, encode_message, serve_rank, trouble_told
from paceline.core.system import stay_on

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.native.shares import ToRank
    from paceline.backend.rank_processes import RankLine

log = logging.getLogger(__name__)
_PIECE = 1 << 24  # bytes read at once


class CoreRank:
    """A rank's layers and stores, and what it does for each message."""

    def __init__(self, line: RankLine, begin: BeginShare, memory: int, weights: int) -> None:
        self._line, self._begin = line, begin
        own = _copied(weights, begin.weight_bytes)
        angles, sizes = (vector_in(own, begin.tables[name]) for name in ("inverse_frequencies", "magnitudes"))
        shape = (-1, begin.settings["head_dim"] // 2)
        self._decoder = kernels.Decoder(
            **begin.settings,
            pool=kernels.ThreadPool(begin.threads),
            embed=None,
            head=None,
            final_norm=np.empty(0, np.float32),
            inverse_frequencies=angles.reshape(shape),
            magnitudes=sizes.reshape(shape),
            layers=layers_in(own, begin.layers),
            ranks=kernels.RankMemory(memory, begin.rank, begin.size),
        )
        self._stores: dict[int, kernels.KVStore] = {}

    def serve(self) -> None:
        """Follow rank 0. Raises `LineEnded` when it is gone."""
        while True:
            self._obey(decode_to_rank(self._line.receive()))

    def _obey(self, message: ToRank) -> None:
        match message:
            case FollowRows():
                self._decoder.follow(
                    self._stores[message.kv], _inputs(message, self._decoder.hidden), message.num_layers
                )
            case NewStore():
                heads = self._begin.settings["heads"][: message.num_layers]
                self._stores[message.number] = kernels.KVStore(self._begin.kv_type, message.num_pages, heads)
                self._line.send(encode_message(RankReady()))
            case DropStores():
                for number in message.numbers:
                    self._stores.pop(number, None)
            case BeginShare():
                raise AssertionError("a rank begins once")


def _copied(file: int, num_bytes: int) -> NDArray[np.uint8]:
    """Return a file's bytes in memory near this thread's cores; close the file."""
    found, done = own_memory(num_bytes), 0
    while done < num_bytes:
        piece = np.frombuffer(os.pread(file, _PIECE, done), np.uint8)
        assert len(piece), "the file of weights is short"
        found[done : done + len(piece)] = piece
        done += len(piece)
    os.close(file)
    return found


def _inputs(message: FollowRows, hidden: int) -> kernels.PassInputs:
    m, none = message, np.empty(0, np.int64)
    first_keys = _ids(m.first_keys)
    return kernels.PassInputs(
        _ids(m.token_ids),
        _ids(m.positions),
        _ids(m.slots),
        _ids(m.cu_len),
        _ids(m.pages).reshape(len(first_keys), -1),
        first_keys,
        np.empty((0, hidden), np.float32),
        none,
        none.reshape(0, 2),
        branched=False,
    )


def _ids(data: bytes) -> NDArray[int64]:
    return np.frombuffer(data, np.int64)


def run(line: RankLine) -> None:
    """Serve one rank 0 until it is gone. Raises `LineEnded` then."""
    begin = decode_to_rank(line.receive())
    assert isinstance(begin, BeginShare), "the first message says what to share"
    with trouble_told(line, begin.rank):
        stay_on(frozenset(begin.cores))
        rank = CoreRank(line, begin, *map(int, sys.argv[2:4]))
        line.send(encode_message(RankReady()))
        rank.serve()


if __name__ == "__main__":
    serve_rank(run)
