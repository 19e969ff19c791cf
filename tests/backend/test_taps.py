"""The tap store of a host: compiled writing and reading do what their readable twins do."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from paceline import kernels
from paceline.backend.rows import Rows
from paceline.backend.taps import HostTapStore
from paceline.core.nouns import PAGE_TOKENS, Taps
from tests.oracles import taps as oracle


def tapped(taps: list[Any], starts: list[int], slots: Any) -> Taps:
    return Taps(dict(enumerate(taps)), np.array([*starts, len(slots)]), slots)


@pytest.mark.parametrize("width", [1, 7, 64, 577])
def test_states_are_read_alike(width: int) -> None:
    random = np.random.default_rng(width)
    rows = Rows(4, 100, frozenset())
    rows.pages[:] = random.permutation(rows.pages.size).reshape(rows.pages.shape)
    store = HostTapStore(rows.pages.size, [0], width)
    store.data[:] = random.standard_normal(store.data.shape) * 100
    store.data[3, 0], store.data[4, 0] = np.inf, 6e-8  # the smallest number there is
    for pieces in ([(0, 0, 40)], [(3, 15, 2), (1, 99, 1), (2, 7, 0)], [(row, 0, 100) for row in range(4)]):
        np.testing.assert_array_equal(store.read(rows.pages, pieces), oracle.read(store, rows.pages, pieces))


@pytest.mark.parametrize("piece", [(4, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 1 << 40), (0, 170, 10)])
def test_pieces_beyond_the_pages_are_refused(piece: tuple[int, int, int]) -> None:
    rows = Rows(4, 100, frozenset())
    store = HostTapStore(8, [0], 4)
    with pytest.raises((ValueError, MemoryError), match=r"row|array"):
        store.read(rows.pages, [piece])


@pytest.mark.parametrize(("num_pages", "width"), [(0, 5), (3, 0), (1, 7), (560, 1728)])
def test_a_store_begins_as_zeros(num_pages: int, width: int) -> None:
    """Also one of more than a huge page, which takes memory only where it is written or expected."""
    memory = kernels.PageMemory(num_pages)
    store, rows = memory.halves(width), num_pages * PAGE_TOKENS
    assert (store.shape, store.dtype) == ((rows, width), np.uint16)
    assert not store.any()
    for first in range(num_pages + 2):
        memory.expect(first)
        store[first * PAGE_TOKENS : (first + 1) * PAGE_TOKENS] += 1
    assert store.sum() == rows * width
    with pytest.raises((ValueError, MemoryError)):
        kernels.PageMemory(1 << 58).halves(1728)


def test_a_store_outlives_the_name_of_its_memory() -> None:
    store = kernels.PageMemory(4000).halves(64)
    gc.collect()
    store[:] = 1
    assert store.sum() == store.size


@pytest.mark.parametrize("hidden", [1, 7, 64, 577])
@pytest.mark.parametrize("num_taps", [1, 3])
def test_states_are_written_alike(num_taps: int, hidden: int) -> None:
    random = np.random.default_rng(hidden)
    rows = Rows(4, 100, frozenset())
    fast, slow = (HostTapStore(rows.pages.size, range(num_taps), hidden) for _ in range(2))
    for store in (fast, slow):
        store.data[:] = 7
    taps = [random.standard_normal((60, hidden)).astype(np.float32) * 30 for _ in range(num_taps)]
    taps[0][:5, 0] = 1e6, -1e6, np.nan, np.inf, -np.inf
    slots = random.permutation(len(fast.data))[:60].astype(np.int64)
    starts, counts = [0, 20, 21, 60], [20, 1, 30, 0]
    fast.write(tapped(taps, starts, slots), counts)
    oracle.write(slow, taps, starts, counts, slots)
    np.testing.assert_array_equal(fast.data, slow.data)
    assert (fast.data == 7).all(axis=1).sum() == len(fast.data) - 51, "no other slot is written"
    assert fast.data[slots[:2], 0].tolist() == [65504, -65504]
    assert np.isnan(fast.data[slots[2], 0])


def test_what_another_backend_tapped_is_written_too() -> None:
    store = HostTapStore(1, [0, 1], 2)
    taps = [np.full((2, 4), 0.5, np.float64)[:, ::2], np.full((2, 2), 3, np.float16)]
    store.write(tapped(taps, [0], np.arange(2)), [2])
    assert store.data[:2].tolist() == [[0.5, 0.5, 3, 3]] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"starts": [2], "counts": [1]}, "beyond the tokens"),
        ({"starts": [1], "counts": [2]}, "beyond the tokens"),
        ({"starts": [-1], "counts": [1]}, "beyond the tokens"),
        ({"starts": [0], "counts": [-1]}, "beyond the tokens"),
        ({"starts": [0, 1]}, "as many"),
        ({"slots": np.array([0, 16])}, "out of range"),
        ({"slots": np.array([0, -1])}, "out of range"),
        ({"slots": np.array([0, 1, 2])}, "do not fit"),
        ({"taps": [np.zeros((2, 4), np.float32)]}, "do not fit"),
        ({"taps": [np.zeros((2, 8), np.float32), np.zeros((2, 0), np.float32)]}, "do not fit"),
        ({"taps": [np.zeros((2, 4), np.float32), np.zeros((1, 4), np.float32)]}, "do not fit"),
        ({"taps": []}, "do not fit"),
        ({"taps": [np.zeros((2, 2), np.float32)] * 3}, "do not fit"),
    ],
)
def test_what_does_not_fit_the_store_is_not_written(change: dict[str, Any], reason: str) -> None:
    taps = change.get("taps", [0, 1])
    store, changed = HostTapStore(1, [0, 1], 4), HostTapStore(1, range(len(taps)), 4)
    changed.bits = store.bits
    fitting: dict[str, Any] = {
        "taps": [np.ones((2, 4), np.float32)] * 2,
        "starts": [0],
        "counts": [2],
        "slots": np.array([0, 15]),
    }
    written = {**fitting, **change}
    store.write(tapped(fitting["taps"], fitting["starts"], fitting["slots"]), fitting["counts"])
    assert store.data.sum() == 16
    with pytest.raises(ValueError, match=reason):
        changed.write(tapped(written["taps"], written["starts"], written["slots"]), written["counts"])


def test_runs_are_numbers_one_after_another() -> None:
    assert oracle.runs([3, 9, 0], [2, 0, 1]) == [3, 4, 0]
