"""Taps of committed tokens on a device, and features beside a pass's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.backend.cuda.device_memory import lazy_zeros
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Taps

_LARGEST = 65504.0  # largest number of half precision


class DeviceTapStore:
    """Hidden states by slot in half precision, see `TapStore`. The last page is scratch."""

    def __init__(self, num_pages: int, layers: Sequence[int], hidden_size: int, device: torch.device) -> None:
        """layers: the tapped layers, in the order in which their states stand side by side."""
        self._layers = layers
        shape = (num_pages + 1) * PAGE_TOKENS, len(layers) * hidden_size
        self.data = lazy_zeros(shape, torch.float16, device)

    @property
    def num_slots(self) -> int:
        """Tokens that fit; the scratch page begins there."""
        return len(self.data) - PAGE_TOKENS

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all states of one token."""
        return int(self.data[0].nbytes)

    def write(self, taps: Taps, counts: Sequence[int]) -> None:
        """Keep the taps of row i's first `counts[i]` tokens."""
        starts: list[int] = np.asarray(taps.cu_len)[:-1].tolist()
        kept = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        places = np.concatenate(kept) if kept else np.empty(0, np.int64)
        states = {layer: torch.as_tensor(taps.states[layer]) for layer in self._layers}
        whole = len(places) == len(taps.slots)
        if not whole:
            picked = torch.from_numpy(places).to(next(iter(states.values())).device)
            states = {layer: of.index_select(0, picked) for layer, of in states.items()}
        self.put(torch.from_numpy(taps.slots[places]).to(self.data.device), states)

    @torch.inference_mode()
    def put(self, slots: torch.Tensor, states: Mapping[int, torch.Tensor]) -> None:
        """Keep the states of tokens at their slots, clamped to half precision's range.

        slots: [n] int64. states: layer -> [n, hidden].
        """
        beside = torch.cat([states[layer].to(self.data.device) for layer in self._layers], dim=-1)
        self.data.index_copy_(0, slots, beside.clamp(-_LARGEST, _LARGEST).to(self.data.dtype))

    def read(self, pages: NDArray[int64], pieces: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Return states of pieces (row of `pages`, first token, tokens) in order, [tokens, width] half."""
        slots = [_slots(pages[row], start, count) for row, start, count in pieces]
        found = np.concatenate(slots) if slots else np.empty(0, np.int64)
        return self.data.index_select(0, torch.from_numpy(found).to(self.data.device))


def _slots(pages: NDArray[int64], start: int, count: int) -> NDArray[int64]:
    """Return the slots of a row's tokens from `start` on."""
    positions = np.arange(start, start + count)
    slots: NDArray[int64] = pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    return slots


def token_places(
    pieces: Sequence[tuple[int, int, int]], cu_len: NDArray[int64]
) -> tuple[NDArray[int64], NDArray[int64]]:
    """Return the places of known tokens and of guesses in a pass.

    Rows have known tokens first. pieces: (row, first token, known tokens), at most one piece per row, in order.
    """
    known = np.zeros(len(cu_len) - 1, np.int64)
    for row, _, count in pieces:
        known[row] = count
    within = np.arange(cu_len[-1]) - np.repeat(cu_len[:-1], np.diff(cu_len))
    is_known = within < np.repeat(known, np.diff(cu_len))
    return np.flatnonzero(is_known), np.flatnonzero(~is_known)


def interleaved(
    known: torch.Tensor, guessed: torch.Tensor, known_at: NDArray[int64], guessed_at: NDArray[int64]
) -> torch.Tensor:
    """Return a pass's features [num_tokens, width] from those of known tokens and of guesses.

    guessed: [num_guesses, width], or [1, width] for all of them.
    """
    features = known.new_empty(len(known_at) + len(guessed_at), known.shape[1])
    for at, of in ((known_at, known), (guessed_at, guessed.expand(len(guessed_at), -1))):
        features.index_copy_(0, torch.from_numpy(at).to(known.device), of.to(features.dtype))
    return features
