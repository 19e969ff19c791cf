"""Readable twins of the host's tap store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.taps import HostTapStore

_LARGEST = float(np.finfo(np.float16).max)


def runs(starts: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return `counts[i]` numbers from `starts[i]` on, for each i."""
    return [i for start, count in zip(starts, counts, strict=True) for i in range(start, start + count)]


def write(store: HostTapStore, taps: Sequence[Any], starts: list[int], counts: list[int], slots: Any) -> None:
    """Write what `HostTapStore.write` writes, plainly."""
    places = runs(starts, counts)
    store.data[slots[places]] = np.clip(np.concatenate(taps, axis=1)[places], -_LARGEST, _LARGEST)


def read(store: HostTapStore, pages: Any, pieces: list[tuple[int, int, int]]) -> Any:
    """Return what `HostTapStore.read` returns, plainly."""
    rows, starts, counts = np.array(pieces, np.int64).T
    positions = np.array(runs(starts.tolist(), counts.tolist()), np.int64)
    found = pages[np.repeat(rows, counts), positions // PAGE_TOKENS]
    return store.data[found * PAGE_TOKENS + positions % PAGE_TOKENS].astype(np.float32)
