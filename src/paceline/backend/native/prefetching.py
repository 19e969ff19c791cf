"""Prefetching of weights as suits the machine: measured at the first start, and kept.

A pass over few tokens waits for memory. Its kernels fetch weights some bytes ahead, into L2 or past it, or leave
that to the processor. Which is best depends on the machine, its threads and the number of tokens, and a wrong
choice costs up to two fifths of a pass. No number depends on it.
"""

from __future__ import annotations

import logging
from statistics import mean
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from paceline import kernels
from paceline.backend.seam import Packed, PassRequest
from paceline.core.system import file_lock, processor, usable_cores
from paceline.model.files.kept_data import KeptData
from paceline.model.files.pull import cache_folder

if TYPE_CHECKING:
    from paceline.backend.native.decoder import NativeDecoder

MOST_AHEAD = 1 << 16


class Prefetching(NamedTuple):
    """Prefetching of rows that are multiplied together."""

    num_bytes: Annotated[int, Meta(ge=0, le=MOST_AHEAD)]  # ahead; 0: not at all
    past: bool  # into L1 alone, past the larger caches


CHOICES = (*(Prefetching(n, past=False) for n in (0, 3072, 6144, 10240)), Prefetching(6144, past=True))
ROWS = (1, 2, 3, 4, 5, 6, 8, 12)  # measured; numbers between them take the next larger one's choice
LEAST_BYTES = 64 << 20  # of weights: fewer may lie in a cache
PASS_BYTES = 160 << 20  # of weights that a measured pass reads; further layers are left out
ROUNDS, BUDGET_S = 9, 2.0  # rounds end early, but for the first, when the budget is spent
LOCK_WAIT_S = 60.0  # for another engine that measures: two at once would time each other
KEPT = KeptData("prefetching")

log = logging.getLogger(__name__)
_Kept = Annotated[tuple[Prefetching, ...], Meta(min_length=len(ROWS), max_length=len(ROWS))]


def tune(decoder: NativeDecoder) -> str:
    """Prefetch as suits this machine, and return how."""
    if decoder.num_ranks > 1 or decoder.weight_bytes < LEAST_BYTES:
        return "as usual"
    cores = f"{processor()} {len(usable_cores())} {decoder.team.num_threads}"
    key = f"{cores} {decoder.describe()} {decoder.weight_bytes}"
    found = _kept(key)
    if found is None:
        with file_lock(cache_folder() / "prefetching.lock", LOCK_WAIT_S, lambda _: None):
            found = _kept(key) or measured(decoder)
            KEPT.write(key, msgspec.json.encode(found))
    use(found)
    words = (f"{rows}: {n}{' past L2' if past else ''}" for rows, (n, past) in zip(ROWS, found, strict=True))
    return "bytes ahead by tokens: " + ", ".join(words)


def use(choices: tuple[Prefetching, ...]) -> None:
    """Prefetch so. choices: for `ROWS`."""
    at_least = 1
    for rows, (num_bytes, past) in zip(ROWS, choices, strict=True):
        for number in range(at_least, rows + 1):
            kernels.set_prefetching(number, num_bytes, past)
        at_least = rows + 1


def measured(decoder: NativeDecoder) -> tuple[Prefetching, ...]:
    """Return the fastest choice for each of `ROWS`."""
    all_layers = decoder.config.num_layers
    num_layers = min(all_layers, -(-PASS_BYTES * all_layers // decoder.weight_bytes))
    kv = decoder.new_kv(1, num_layers)
    requests = {n: PassRequest(_rows_of_tokens(n), kv, (), num_layers=num_layers) for n in ROWS}
    for request in requests.values():  # the first pass may read weights from a disk
        decoder.launch(request).wait()
    shares: list[list[list[float]]] = []
    start = monotonic()
    while not shares or (len(shares) < ROUNDS and monotonic() - start < BUDGET_S):
        shares.append([_shares(decoder, n, request) for n, request in requests.items()])
    return tuple(CHOICES[best] for best in np.median(shares, axis=0).argmin(axis=1))


def _shares(decoder: NativeDecoder, rows: int, request: PassRequest) -> list[float]:
    """Return times of a pass with each choice over their mean, as machines drift."""
    times = []
    for choice in CHOICES:
        kernels.set_prefetching(rows, *choice)
        start = perf_counter()
        decoder.launch(request).wait()
        times.append(perf_counter() - start)
    return [time_s / mean(times) for time_s in times]


def _kept(key: str) -> tuple[Prefetching, ...] | None:
    data = KEPT.read(key)
    try:
        return None if data is None else msgspec.json.decode(data, type=_Kept)
    except msgspec.DecodeError as error:
        log.warning("what was measured of prefetching is measured anew: %s", error)
        return None


def _rows_of_tokens(count: int) -> Packed:
    """Return a pass over the first tokens of a page, whose successors nobody asks for."""
    at, ones, page = np.arange(count), np.ones(count, np.int64), np.zeros((1, 1), np.int64)
    return Packed(ones, at, slots=at, cu_len=np.array([0, count]), pages=page, wanted=np.zeros(0, np.int64))
