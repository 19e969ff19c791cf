"""The store of features: what is read is what lies in a row's slots, by the compiled reading as by its twin."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.draft.heads.features import FeatureStore, runs
from paceline.model.rows import Rows


@pytest.mark.parametrize("width", [1, 7, 64, 577])
def test_features_are_read_alike(width: int) -> None:
    random = np.random.default_rng(width)
    rows = Rows(4, 100, frozenset())
    rows.pages[:] = random.permutation(rows.pages.size).reshape(rows.pages.shape)
    store = FeatureStore(rows, rows.pages.size, width)
    store._data[:] = random.standard_normal(store._data.shape) * 100
    store._data[3, 0], store._data[4, 0] = np.inf, 6e-8  # the smallest number there is
    for pieces in ([(0, 0, 40)], [(3, 15, 2), (1, 99, 1), (2, 7, 0)], [(row, 0, 100) for row in range(4)]):
        np.testing.assert_array_equal(store.read(pieces), store.read_slow(pieces))


@pytest.mark.parametrize("piece", [(4, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 1 << 40), (0, 170, 10)])
def test_pieces_beyond_the_pages_are_refused(piece: tuple[int, int, int]) -> None:
    rows = Rows(4, 100, frozenset())
    store = FeatureStore(rows, 8, 4)
    with pytest.raises((ValueError, MemoryError), match=r"row|array"):
        store.read([piece])


def test_runs_are_numbers_one_after_another() -> None:
    assert runs([3, 9, 0], [2, 0, 1]) == [3, 4, 0]
