"""Taps on a host: hidden states of committed tokens, stored by page, and their features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import float16, float32, floating, int64
    from numpy.typing import NDArray

    from paceline.backend.seam import FedBack, PassRequest
    from paceline.core.nouns import Taps


class HostTapStore:
    """Hidden states by slot, in half precision; see `TapStore`.

    It keeps states, not features: a prompt's states are read only if its request drafts, and to keep them costs a
    fraction of what their features cost.
    """

    def __init__(self, num_pages: int, layers: Sequence[int], hidden_size: int) -> None:
        """layers: the tapped layers, in the order in which their states stand side by side."""
        self._layers = layers
        width = len(layers) * hidden_size
        self._memory = kernels.PageMemory(num_pages)
        self.bits = self._memory.halves(width)  # as kernels read and write them
        self._memory.expect(0)

    @property
    def data(self) -> NDArray[float16]:
        """States of all slots, [slots, width]."""
        return self.bits.view(np.float16)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all states of one token."""
        return int(self.data[0].nbytes)

    def write(self, taps: Taps, counts: Sequence[int]) -> None:
        """Keep the taps of row i's first `counts[i]` tokens, clamped to half precision's range."""
        states = [np.ascontiguousarray(taps.states[layer], np.float32) for layer in self._layers]
        starts: list[int] = taps.cu_len.tolist()[:-1]
        kernels.write_halves(states, starts, list(counts), taps.slots, self.bits)
        along_rows = taps.slots[: taps.cu_len[-1]]  # then come slots of branches, in pages of their own
        self._memory.expect(int(along_rows.max(initial=0)) // PAGE_TOKENS + 1)

    def read(self, pages: NDArray[int64], pieces: Sequence[tuple[int, int, int]]) -> NDArray[float32]:
        """Return states of pieces (row of `pages`, first token, tokens) in order, [tokens, width] float32."""
        states = np.empty((sum([count for *_, count in pieces]), self.bits.shape[1]), np.float32)
        kernels.read_halves(self.bits, pages, list(pieces), states)
        return states


def fed_back_rows(fed_back: FedBack) -> NDArray[floating]:
    """Return the features fed back to guesses, [num_guesses, width]."""
    assert isinstance(fed_back.hidden, np.ndarray)
    features: NDArray[floating] = fed_back.hidden.take(fed_back.rows, axis=0)
    return features


def host_features(
    request: PassRequest,
    fuse: Callable[[NDArray[floating]], NDArray[floating]],
    mask: Callable[[], NDArray[floating]],
) -> NDArray[floating]:
    """Return the features beside a head's tokens, [num_tokens, width]; of guesses in float32.

    fuse: makes features [n, width] of taps. mask: returns the feature [1, width] of tokens that are not known yet.
    """
    asked, packed = request.features, request.packed
    assert asked is not None
    assert isinstance(asked.taps, HostTapStore)
    if asked.fed_back is not None and not asked.pieces:
        return fed_back_rows(asked.fed_back).astype(np.float32, copy=False)
    known = fuse(asked.taps.read(packed.pages, asked.pieces))
    if len(known) == len(packed.token_ids):
        return known
    guessed = mask() if asked.fed_back is None else fed_back_rows(asked.fed_back)
    return interleave(known, asked.pieces, guessed, packed.cu_len)


def interleave(
    known: NDArray[floating],
    pieces: Sequence[tuple[int, int, int]],
    guessed: NDArray[floating],
    cu_len: NDArray[int64],
) -> NDArray[float32]:
    """Return a pass's features [num_tokens, width] float32: rows have known tokens, then guesses.

    known: features of all pieces, one of each row. guessed: [num_guesses, width], or [1, width] for all of them.
    """
    counts = {row: count for row, _, count in pieces}
    ends: list[int] = cu_len.tolist()
    features = np.empty((ends[-1], known.shape[1]), np.float32)
    guesses = np.broadcast_to(guessed, (ends[-1] - len(known), known.shape[1]))
    done = num_guessed = 0
    for row, end in enumerate(ends[1:]):
        begin = ends[row] + counts.get(row, 0)  # where the row's guesses begin
        features[ends[row] : begin] = known[done : done + begin - ends[row]]
        features[begin:end] = guesses[num_guessed : num_guessed + end - begin]
        done, num_guessed = done + begin - ends[row], num_guessed + end - begin
    return features
