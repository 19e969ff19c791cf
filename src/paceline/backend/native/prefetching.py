"""Prefetching of weights as suits the machine: measured at the first start, and kept.

A pass over few tokens waits for memory. Its kernels fetch weights some bytes ahead, into L2 or past it, or leave
that to the processor. The best depends on machine, threads and tokens. The choice changes times, never results.
"""

from __future__ import annotations

import logging
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from paceline import kernels
from paceline.backend.seam import Packed, PassRequest
from paceline.core.system import file_lock, processor
from paceline.model.files.kept_data import KeptData
from paceline.model.files.pull import cache_folder

if TYPE_CHECKING:
    from paceline.backend.native.decoder import NativeDecoder
    from paceline.model.files.packed_cache import Progress

MOST_AHEAD = 1 << 16


class Prefetching(NamedTuple):
    """Prefetching of rows that are multiplied together."""

    num_bytes: Annotated[int, Meta(ge=0, le=MOST_AHEAD)]  # bytes fetched ahead; 0: none
    past: bool  # into L1 alone, past the larger caches


CHOICES = (
    *(Prefetching(n, past=False) for n in (0, 6144, 10240, 24576, 49152)),
    *(Prefetching(n, past=True) for n in (6144, 10240)),
)
ROWS = (1, 2, 3, 4, 5, 6, 8)  # numbers of rows that are measured; 7, and 9 to `MOST_ROWS`, take the choice of 8
MOST_ROWS = kernels.MOST_IN_PIECE  # most rows that prefetch like this: more are multiplied in several pieces
LEAST_BYTES, PASS_BYTES = 64 << 20, 160 << 20  # smallest model: less may lie in a cache; layers that are timed
STAGES = ((3, 4), (3, 2), (6, 1))  # (rounds, choices that remain after them)
BUDGET_S, LOCK_WAIT_S = 4.0, 60.0  # time to measure; wait for another engine that measures
KEPT = KeptData("prefetching")

log = logging.getLogger(__name__)
_Kept = Annotated[tuple[Prefetching, ...], Meta(min_length=len(ROWS), max_length=len(ROWS))]


def tune(decoder: NativeDecoder, progress: Progress | None = None) -> str:
    """Prefetch as suits this machine, and return how. progress: of measuring, in numbers of tokens."""
    if decoder.num_ranks > 1 or decoder.config.experts or decoder.weight_bytes < LEAST_BYTES:
        return "as usual"  # which experts a pass reads depends on its text
    key = f"{processor()} {decoder.team.num_threads} {decoder.describe()} {decoder.weight_bytes}"
    if (found := _kept(key)) is None:
        with file_lock(cache_folder() / "prefetching.lock", LOCK_WAIT_S, lambda _: None):
            if (found := _kept(key)) is None:
                found = measured(decoder, progress)
                KEPT.write(key, msgspec.json.encode(found))
    use(found)
    words = (f"{rows}: {n}{' past L2' if past else ''}" for rows, (n, past) in zip(ROWS, found, strict=True))
    return "as measured here, bytes ahead by tokens: " + ", ".join(words)


def use(choices: tuple[Prefetching, ...]) -> None:
    """Prefetch by these choices, one for each of `ROWS`."""
    for number in range(1, MOST_ROWS + 1):
        at = next((i for i, rows in enumerate(ROWS) if rows >= number), -1)
        kernels.set_prefetching(number, *choices[at])


def measured(decoder: NativeDecoder, progress: Progress | None = None) -> tuple[Prefetching, ...]:
    """Return the fastest choice for each of `ROWS`."""
    all_layers, tables = decoder.config.num_layers, {decoder.tables.embed, decoder.tables.head}
    layer_bytes = (decoder.weight_bytes - sum(table.num_bytes for table in tables)) // all_layers
    num_layers = min(all_layers, -(-PASS_BYTES // max(layer_bytes, 1)))
    kv, taps = decoder.new_kv(1, num_layers), (num_layers,)  # taps: they need the last layer whole
    requests = {n: PassRequest(_rows_of_tokens(n), kv, (), num_layers=num_layers, taps=taps) for n in ROWS}
    found, start = list[Prefetching](), monotonic()
    for n, request in requests.items():
        found.append(found[-1] if monotonic() - start > BUDGET_S and found else _fastest(decoder, n, request))
        if progress:
            progress("measuring prefetching", len(found), len(ROWS))
    return tuple(found)


def _fastest(decoder: NativeDecoder, rows: int, request: PassRequest) -> Prefetching:
    left = list(CHOICES)
    decoder.launch(request).wait()  # untimed: it may read weights from a disk
    for num_rounds, num_left in STAGES:
        times = np.array([times_s(decoder, rows, request, left) for _ in range(num_rounds)])
        best = np.median(times / times.mean(axis=1, keepdims=True), axis=0).argsort()[:num_left]
        left = [left[index] for index in best]
    return left[0]


def times_s(decoder: NativeDecoder, rows: int, request: PassRequest, left: list[Prefetching]) -> list[float]:
    """Return the seconds of a pass of `rows` tokens with each choice, one after another."""
    found = []
    for choice in left:
        kernels.set_prefetching(rows, *choice)
        start = perf_counter()
        decoder.launch(request).wait()
        found.append(perf_counter() - start)
    return found


def _kept(key: str) -> tuple[Prefetching, ...] | None:
    data = KEPT.read(key)
    try:
        return None if data is None else msgspec.json.decode(data, type=_Kept)
    except msgspec.DecodeError as error:
        log.warning("what was measured of prefetching is measured anew: %s", error)
        return None


def _rows_of_tokens(count: int) -> Packed:
    """Return a pass over the first tokens of a page, which wants no logits."""
    at, ones, page = np.arange(count), np.ones(count, np.int64), np.zeros((1, 1), np.int64)
    return Packed(ones, at, slots=at, cu_len=np.array([0, count]), pages=page, wanted=np.zeros(0, np.int64))
