"""Draft heads on `native`: in their target's kernels, on its threads or on other cores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from paceline import kernels
from paceline.backend.native.decoder import as_float32, run_pass, run_steps
from paceline.backend.seam import Capabilities
from paceline.backend.taps import HostTapStore, host_features
from paceline.backend.target import Deferred

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import float32, floating, int64
    from numpy.typing import NDArray

    from paceline.backend.native.decoder import NativeDecoder
    from paceline.backend.native.draft_vocabulary import DraftVocabulary
    from paceline.backend.seam import PassRequest, PassResult, Pending
    from paceline.model.heads.config import HeadConfig


@dataclass(eq=False)
class NativeHead:
    """A head over packed weights, and KV of the target's type. `load.load_runner` makes it."""

    config: HeadConfig
    weight_type: str  # type of all matrices
    weight_bytes: int  # of the packed matrices, without those that are the target's
    target: NativeDecoder
    team: kernels.ThreadPool
    compiled: kernels.Decoder
    vocabulary: DraftVocabulary
    written: kernels.Matrix  # [num_tokens, width] a row for each token of the vocabulary
    fc: kernels.Matrix
    norms: NDArray[float32]  # [num_norms, part] right before `fc`, each for a part of the states
    vectors: Mapping[str, NDArray[float32]]  # norms and biases outside the layers
    mask_taps: NDArray[floating] | None  # [tapped_size] taps that stand for those of tokens not known yet
    capabilities: ClassVar = Capabilities(multi_step=True)  # not asynchronous: its caller waits for drafts

    @cached_property
    def _mask_feature(self) -> NDArray[float32]:
        """Feature [1, width] of tokens that are not known yet."""
        assert self.mask_taps is not None
        return self.fuse(self.mask_taps[None])

    def set_request_tokens(self, token_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `DraftExecutor`."""
        self.vocabulary.set_request_tokens(token_ids, self.compiled, self.written.put_row)

    def new_kv(self, num_pages: int) -> kernels.KVStore:
        """Return an empty store of `num_pages` pages for the head's layers."""
        c = self.config.layers
        return kernels.KVStore(self.target.kv_type, num_pages, c.kv_heads())

    def new_tap_store(self, num_pages: int) -> HostTapStore:
        """Return an empty store of `num_pages` pages for the taps that the head reads."""
        return HostTapStore(num_pages, self.config.taps, self.config.target_hidden_size)

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass over entries: tokens, and the features of the tokens before them."""
        return Deferred(partial(self._run, request))

    def _run(self, request: PassRequest) -> PassResult:
        c, vocab, features = self.config, self.vocabulary.num_tokens, self._features(request)
        last, wanted = c.layers.num_layers, request.packed.wanted
        if request.steps:
            return run_steps(self.compiled, request, vocab, last, features)
        result = run_pass(self.compiled, request, vocab, last, features, (last,) if len(wanted) else ())
        hidden = result.taps[last][wanted] if len(wanted) else np.empty((0, c.layers.hidden_size), np.float32)
        fed_back = self._norm("norm", as_float32(hidden)) if c.norm_output else hidden
        return replace(self.vocabulary.spread(result, request.specs), taps={}, hidden=fed_back)

    def _features(self, request: PassRequest) -> NDArray[float32]:
        """Return the features beside the tokens of a pass, [num_tokens, width]."""
        return as_float32(host_features(request, self.fuse, lambda: self._mask_feature))

    def fuse(self, tapped: NDArray[floating]) -> NDArray[float32]:
        """Return the feature [n, width] of each token from its taps [n, tapped_size]."""
        c, rows = self.config, as_float32(tapped)
        if c.algorithm.guesses_features:
            return _norm(self.target.tables.final_norm, rows, c.target_norm_eps)
        if c.norm_before_fc and c.fc_norm:
            rows = self._norm("input_norm", rows)
        features = np.empty((len(rows), c.layers.hidden_size), np.float32)
        kernels.fuse(self.team, self.fc, rows, self.norms, c.layers.norm_eps, features)
        return features

    def _norm(self, name: str, rows: NDArray[float32]) -> NDArray[float32]:
        return _norm(self.vectors[name], rows, self.config.layers.norm_eps)


def _norm(weight: NDArray[float32], rows: NDArray[float32], eps: float) -> NDArray[float32]:
    """Norm rows [..., size]; the last axes of `weight` are theirs."""
    squares = np.einsum("...i,...i->...", rows, rows)[..., None] / np.float32(rows.shape[-1])
    return as_float32(rows / np.sqrt(squares + np.float32(eps)) * weight)
