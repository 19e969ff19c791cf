"""Block heads on `native`: one call stores context, one drafts a block."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.native.decoder import as_float32, read_inputs, run_pass, run_steps
from paceline.backend.native.head import NativeHead
from paceline.backend.sampling import logit_rows
from paceline.backend.seam import PassResult
from paceline.backend.taps import fed_back_rows

if TYPE_CHECKING:
    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.backend.seam import CorrectRequest, PassRequest

_NOTHING = np.empty(0, np.int64)


class NativeBlockHead(NativeHead):
    """A block head over packed weights."""

    def _run(self, request: PassRequest) -> PassResult:
        last = self.config.layers.num_layers
        if request.features is not None:
            assert isinstance(request.kv, kernels.KVStore)
            inputs = read_inputs(self.compiled, request.packed, self._features(request))
            self.compiled.store_context(request.kv, inputs)
            return PassResult(_NOTHING)
        if request.steps:
            return run_steps(self.compiled, request, self.vocabulary.num_tokens, last)
        wanted = request.packed.wanted
        whole = replace(request, packed=replace(request.packed, wanted=_NOTHING))
        states = run_pass(self.compiled, whole, self.vocabulary.num_tokens, last, taps=(last,)).taps[last]
        return PassResult(_NOTHING, hidden=self._norm("norm", as_float32(states[wanted])))

    def fuse(self, tapped: NDArray[floating]) -> NDArray[float32]:
        """Return the feature [n, width] of each token from its taps [n, tapped_size]."""
        return self._norm("hidden_norm", super().fuse(tapped))

    def correct(self, request: CorrectRequest) -> PassResult:
        """Choose the next guesses, corrected by those before them, see `BlockHeadRunner`."""
        vocab, specs, states = self.vocabulary.num_tokens, request.specs, request.hidden
        assert isinstance(states, np.ndarray)
        assert self.config.block is not None
        n = len(specs)
        read_specs = kernels.read_specs(list(specs), self.compiled.vocab if self.compiled.maps_ids else vocab)
        logits = np.empty((read_specs.num_logit_rows, vocab), np.float32)
        chosen, margins = np.empty(n, np.int64), np.empty(n, np.float32)
        state = np.empty((n, self.config.block.state_size), np.float32)
        self.compiled.correct(
            as_float32(states[request.places]),
            np.array(request.before, np.int64),
            as_float32(fed_back_rows(request.state)),
            read_specs,
            vocab=vocab,
            chosen=chosen,
            logits=logits,
            margins=margins,
            state=state,
        )
        found = PassResult(chosen, margins=margins)
        if len(logits):
            found = replace(found, logits=logits, logit_idx=logit_rows(specs))
        return replace(self.vocabulary.spread(found, specs), hidden=state)
