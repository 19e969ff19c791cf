"""The relay of a parallel head on `native`: messages between guesses of one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.native.decoder import as_float32
from paceline.backend.sampling import logit_rows
from paceline.backend.seam import PassResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float32, int64
    from numpy.typing import NDArray

    from paceline.backend.native.draft_vocabulary import DraftVocabulary
    from paceline.backend.seam import FedBack, RelayRequest
    from paceline.core.nouns import SamplingSpec


class Relay:
    """A head's relay. The head's rows were multiplied with `relay.out` beforehand."""

    def __init__(self, out: NDArray[float32], written: kernels.Matrix) -> None:
        """out: [width, relay_size]. written: [num_tokens, relay_size], the head's rows times `out`."""
        self._out, self._written = out, written

    def put_row(self, index: int, row: NDArray[float32]) -> None:
        """Write another token, of this row [width] of the head."""
        self._written.put_row(index, as_float32(row @ self._out))

    def run(self, compiled: kernels.Decoder, vocabulary: DraftVocabulary, request: RelayRequest) -> PassResult:
        """Choose the next guesses, see `HeadRunner.relay`."""
        vocab, specs, size = vocabulary.num_tokens, request.specs, self._out.shape[1]
        states = request.hidden
        assert isinstance(states, np.ndarray)
        token_ids, before = np.empty(0, np.int64), np.empty((0, size), np.float32)
        if request.known is not None:
            token_ids, before = np.array(request.known[0], np.int64), fed_back_rows(request.known[1])
        read_specs = kernels.read_specs(list(specs), compiled.vocab if compiled.maps_ids else vocab)
        logits = np.empty((read_specs.num_logit_rows, vocab), np.float32)
        chosen, margins = np.empty(len(specs), np.int64), np.empty(len(specs), np.float32)
        messages = np.empty((len(request.first), size), np.float32)
        compiled.relay(
            as_float32(states[request.first]),
            as_float32(states[request.places]),
            token_ids,
            before,
            read_specs,
            vocab=vocab,
            chosen=chosen,
            logits=logits,
            margins=margins,
            messages=messages,
        )
        return replace(vocabulary.spread(chosen_by(chosen, margins, logits, specs), specs), hidden=messages)


def chosen_by(
    chosen: NDArray[int64], margins: NDArray[float32], logits: NDArray[float32], specs: Sequence[SamplingSpec]
) -> PassResult:
    """Return guesses of one place, with what their specs ask for.

    chosen, margins: [n]. logits: [m, vocab], m specs ask for them.
    """
    found = PassResult(chosen, margins=margins)
    return replace(found, logits=logits, logit_idx=logit_rows(specs)) if len(logits) else found


def fed_back_rows(fed_back: FedBack) -> NDArray[float32]:
    """Return the features fed back to guesses, [num_guesses, width]."""
    assert isinstance(fed_back.hidden, np.ndarray)
    return as_float32(fed_back.hidden.take(fed_back.rows, axis=0))
