"""Adapter of Paceline: the whole engine, host side included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import paceline
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.assembly.build import assemble
from paceline.engine.assembly.build import load as load_target
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from tools.measure.quality import QualityText, log_probs
from tools.peers.protocol import PeerAnswers, PeerSetting, Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float32
    from numpy.typing import NDArray

    from paceline.backend.seam import Decoder
    from paceline.engine.engine import Engine


@dataclass(frozen=True, slots=True, eq=False)
class PacelinePeer:
    """An engine with or without a drafter."""

    engine: Engine
    decoder: Decoder

    def describe(self) -> str:
        """Return the version and the decoder's description."""
        return f"paceline {paceline.__version__}: {self.decoder.describe()}"

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> PeerAnswers:
        """Continue all prompts at once, see `protocol.Peer`."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        recorder = Recorder(len(prompts))
        for row, ids in enumerate(prompts):
            self.engine.add(Request(str(row), tuple(ids), params, row))
        while self.engine.has_work:
            for outcome in self.engine.step():
                recorder.add(int(outcome.request_id), outcome.token_ids)
        self.engine.forget()
        return recorder.answers()

    def logits(self, token_ids: Sequence[int], num_judged: int) -> NDArray[float32]:
        """Return log-probabilities [num_judged, vocab], which serve as logits."""
        return log_probs(self.decoder, QualityText(tuple(token_ids), num_judged)).astype(np.float32)


def load(setting: PeerSetting, weights: str, kv: str = "i16", draft: str = "off") -> PacelinePeer:
    """Load a model with types of weights and KV, and a drafter."""
    config = EngineConfig(
        model=setting.file,
        draft=draft,
        weights=weights,
        kv=kv,
        threads=setting.threads,
        prefix_cache=False,
        limits=Limits(num_rows=setting.max_rows, max_len=setting.max_len, prefill_tokens=setting.prefill_tokens),
    )
    target = load_target(config)
    return PacelinePeer(assemble(config, target).engine, target.decoder)
