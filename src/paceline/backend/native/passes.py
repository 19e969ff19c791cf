"""Passes of compiled layers: what they read and write as the kernels take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline import kernels
from paceline.backend.sampling import logit_rows
from paceline.backend.seam import SampledTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float32, float64
    from numpy.typing import NDArray

    from paceline.backend.packed import Packed
    from paceline.backend.seam import StepLimit
    from paceline.core.nouns import SamplingSpec


def forward(
    decoder: kernels.Decoder,
    packed: Packed,
    kv: kernels.KVStore,
    specs: Sequence[SamplingSpec],
    *,
    vocab: int,
    num_layers: int,
    taps: Sequence[int] = (),
    features: NDArray[float32] | None = None,
) -> SampledTokens:
    """Run a pass of compiled layers and choose among the first `vocab` tokens of their head.

    features: [num_tokens, hidden] float32 where the decoder reads them, None elsewhere.
    """
    whole = whole_pass(decoder, packed, kv, specs, vocab, num_layers, taps, features)
    decoder.forward(*whole.arguments)
    return whole.chosen


class Whole(NamedTuple):
    """A pass as kernels take it, and what there will be once it has run."""

    arguments: tuple[Any, ...]  # of `kernels.Decoder.forward`
    chosen: SampledTokens


def whole_pass(
    decoder: kernels.Decoder,
    packed: Packed,
    kv: kernels.KVStore,
    specs: Sequence[SamplingSpec],
    vocab: int,
    num_layers: int,
    taps: Sequence[int],
    features: NDArray[float32] | None = None,
) -> Whole:
    """Put together a pass of compiled layers, see `forward`, and room for what it says."""
    read_chooses = kernels.read_chooses(list(specs), decoder.vocab if decoder.maps_ids else vocab)
    num_logit_rows = read_chooses.num_logit_rows
    logits = np.empty((num_logit_rows, vocab), np.float32)
    chosen = np.empty(len(packed.wanted), np.int64)
    tapped = np.empty((len(taps), len(packed.token_ids), decoder.hidden), np.float32)
    margins = np.empty(len(specs) if any(c.margin for c in specs) else 0, np.float32)
    read = _read(decoder, packed, features)
    states, told = dict(zip(taps, tapped, strict=True)), margins if margins.size else None
    idx = logit_rows(specs) if num_logit_rows else None
    return Whole(
        (kv, read, read_chooses, vocab, num_layers, list(taps), tapped, chosen, logits, margins),
        SampledTokens(chosen, logits if num_logit_rows else None, idx, states, told),
    )


def forward_in_turn(
    decoder: kernels.Decoder,
    packed: Packed,
    kv: kernels.KVStore,
    specs: Sequence[SamplingSpec],
    ends: Sequence[StepLimit],
    *,
    vocab: int,
    num_layers: int,
    features: NDArray[float32] | None = None,
) -> SampledTokens:
    """Run passes in turn, see `MultiStep`; what a pass makes of a token is the feature beside the next."""
    chosen, margins = np.empty(len(specs), np.int64), np.empty(len(specs), np.float32)
    decoder.forward_in_turn(
        kv,
        _read(decoder, packed, features),
        kernels.read_chooses(list(specs), decoder.vocab if decoder.maps_ids else vocab),
        vocab=vocab,
        num_layers=num_layers,
        depths=[end.depth for end in ends],
        stops=_stop_table(ends),
        pointers=[end.pointer for end in ends],
        chosen=chosen,
        margins=margins,
    )
    return SampledTokens(chosen, None, None, margins=margins)


def _stop_table(ends: Sequence[StepLimit]) -> NDArray[float64]:
    """Return what tells rows to leave: odds, sureness, least, 0 for those that stay. [sum of depths, 3]"""
    if not any(end.stop for end in ends):
        return np.empty((0, 3))
    table: list[float] = []
    for depth, stop, _ in ends:
        if stop is None:
            table += [0.0] * (3 * depth)
        else:
            for odds, least in zip(stop.odds[:depth], stop.least[:depth], strict=True):
                table += odds, stop.sureness, least
    return np.array(table).reshape(-1, 3)


def _read(decoder: kernels.Decoder, packed: Packed, features: NDArray[float32] | None) -> kernels.Read:
    return kernels.Read(
        packed.token_ids,
        packed.positions,
        packed.slots,
        packed.cu_len,
        np.ascontiguousarray(packed.pages),
        np.zeros(len(packed.pages), np.int64) if packed.first_keys is None else packed.first_keys,
        np.empty((0, decoder.hidden), np.float32) if features is None else features,
        packed.wanted,
    )
