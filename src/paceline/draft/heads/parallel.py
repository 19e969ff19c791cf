"""P-EAGLE: heads that make all drafts in one pass.

Mask tokens with a learnt feature stand for the tokens that are not known yet. So a guess does not depend on the
guess before it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from paceline.backend.sampling import pick, with_hint
from paceline.backend.seam import HintRule
from paceline.draft.autoregressive import extend
from paceline.draft.heads.head_drafter import HeadDrafter
from paceline.draft.hints import MAX_MATCH, MIN_MATCH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline import kernels
    from paceline.backend.seam import HeadRunner, PassResult, Span
    from paceline.core.nouns import SamplingSpec
    from paceline.draft.autoregressive import Chain
    from paceline.draft.drafter import Target
    from paceline.draft.heads.asked_head import AskedHead
    from paceline.model.heads.checkpoint import Head


BLIND_GAIN = 8.0  # gain of hints to guesses that do not know the guesses before them
_REACH = MAX_MATCH  # most tokens of a path per token matched: more than are drafted, so it bounds nothing
_LEAST_SHARE = 0.05  # a path ends when fewer than this share of its places are still on it


class ParallelHeadDrafter(HeadDrafter):
    """Drafts all tokens in one pass."""

    hint_gain = 0.0  # no hints that depend on guesses

    def __init__(self, asked: AskedHead, target: Target, head: Head, runner: HeadRunner) -> None:
        super().__init__(asked, target, head, runner)
        assert head.config.mask_token_id is not None, "the config of a parallel head names it"
        self._mask = head.config.mask_token_id

    @classmethod
    def late_rule(cls) -> HintRule:
        """Return the rule of hints that do not know the guesses."""
        return HintRule(MIN_MATCH, MAX_MATCH, BLIND_GAIN, reach=_REACH, least_share=_LEAST_SHARE)

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        result, first = self._run(chains, starts)
        wanting = list(chains.values())
        while wanting:
            picked = pick(result, [first[c.row] + len(c.token_ids) for c in wanting])
            extend(self._rows, wanting, partial(_already_run, picked), dense=self._dense)
            wanting = [c for c in wanting if c.goes_on]

    def _run(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> tuple[PassResult, dict[int, int]]:
        """Run the pass. Returns its result for all guesses, and where each row's begin.

        Under penalties a choice waits for the guesses before it, as they are counted.
        """
        specs: list[SamplingSpec] = []
        first: dict[int, int] = {}
        for row, text in zip(starts, self._rows.texts(list(starts)), strict=True):
            first[row] = len(specs)
            masks = [self._mask] * (chains[row].depth - 1)
            tail = self._rows.tokens(row)[-MAX_MATCH:]
            for spec in hinted(self._rows.row_specs(row, masks), text, tail, BLIND_GAIN):
                waits = self._dense or spec.params.penalised
                specs.append(spec._replace(kind="logits" if waits else spec.kind, margin=True))
        spans: list[Span] = [
            (row, start, self._rows.known_len(row) - start, [self._mask] * (chains[row].depth - 1))
            for row, start in starts.items()
        ]
        request = self._request(spans, [chains[row].depth for row in starts], specs)
        return self._head.launch(request).wait(), first


def hinted(
    specs: Sequence[SamplingSpec], text: kernels.TextIndex, tail: NDArray[int64], gain: float
) -> list[SamplingSpec]:
    """Return specs of a row's next drafts, with hints that do not depend on guesses.

    Where the text ended like this before, the tokens that followed are the hints, place by place, as far as known.
    """
    found, _, match = text.propose(tail, len(specs), MIN_MATCH, MAX_MATCH, _REACH, _LEAST_SHARE)
    some = [with_hint(c, token_id, gain * math.log(match)) for c, token_id in zip(specs, found, strict=False)]
    return [*some, *specs[len(some) :]]


def _already_run(result: PassResult, _: Sequence[SamplingSpec]) -> PassResult:
    """Stand for a pass that has been run."""
    return result
