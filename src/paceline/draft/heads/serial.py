"""EAGLE-1 and EAGLE-3: heads that draft token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.draft.autoregressive import draft_in_turn
from paceline.draft.heads.drafter import HeadDrafter
from paceline.draft.hints import RecycledGains

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.rows import Span
    from paceline.backend.seam import SampledTokens, StepLimit
    from paceline.core.nouns import SamplingSpec
    from paceline.draft.autoregressive import Chain
    from paceline.draft.drafter import Target
    from paceline.draft.heads.options import HeadOptions
    from paceline.model.heads.checkpoint import Head


class SerialHeadDrafter(HeadDrafter):
    """Drafts token by token: what the head makes of one entry stands for the feature of the next."""

    hint_gain = 1.5
    recycled_gains = RecycledGains(pair=4.0, far_pair=1.0, token=2.0)

    def __init__(self, options: HeadOptions, target: Target, head: Head) -> None:
        super().__init__(options, target, head)
        self._fed_back: dict[int, NDArray[floating]] = {}  # row -> [width] of its newest guess

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        at_once = self._run_in_turn if self._head.in_turn else None
        draft_in_turn(self._rows, chains, starts, self._run, at_once, dense=self._dense)

    def _run_in_turn(
        self, spans: Sequence[Span], specs: Sequence[SamplingSpec], ends: Sequence[StepLimit]
    ) -> SampledTokens:
        assert self._head.in_turn is not None
        packed = self._pack(spans, [1] * len(spans), max(end.depth for end in ends) - 1)
        return self._head.in_turn(packed, self._read(spans, None), self._kv, specs, ends)

    def _run(self, spans: Sequence[Span], specs: Sequence[SamplingSpec]) -> SampledTokens:
        packed, features = self._pack(spans, [1] * len(spans)), self._read(spans, self._fed_back)
        chosen, fed_back = self._head.run(packed, features, self._kv, specs)
        self._fed_back = {row: feature for (row, *_), feature in zip(spans, fed_back, strict=True)}
        return chosen
