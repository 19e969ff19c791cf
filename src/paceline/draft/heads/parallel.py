"""P-EAGLE: heads that make all drafts in one pass.

Mask tokens with a learnt feature stand for the tokens that are not known yet. So what is guessed at one place
knows nothing of the guess before it; a head with a relay tells it, after the pass and for a part of its cost.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paceline.backend.sampling import pick
from paceline.draft.autoregressive import draft_in_turn, extend
from paceline.draft.heads.drafter import HeadDrafter
from paceline.draft.hints import RecycledGains, hinted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.backend.packed import Packed
    from paceline.backend.rows import Span
    from paceline.backend.seam import SampledTokens, StepLimit
    from paceline.core.nouns import SamplingSpec
    from paceline.draft.autoregressive import Chain
    from paceline.draft.drafter import Target
    from paceline.draft.heads.options import HeadOptions
    from paceline.model.heads.checkpoint import Head


UNKNOWING_GAIN = 8.0  # of hints to guesses that do not know those before them


class ParallelHeadDrafter(HeadDrafter):
    """Drafts all tokens in one pass."""

    hint_gain = 0.0  # none by guesses

    def __init__(self, options: HeadOptions, target: Target, head: Head) -> None:
        super().__init__(options, target, head)
        assert head.config.mask_token_id is not None, "the config of a parallel head names it"
        self._mask = head.config.mask_token_id
        self._mask_feature = self._head.fuse(head.weights["mask_hidden"][None])[0]  # [width]

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        chosen, first = self._run(chains, starts)
        wanting = list(chains.values())
        while wanting:
            found = pick(chosen, [first[c.row] + len(c.token_ids) for c in wanting])
            extend(self._rows, wanting, partial(_already, found), dense=self._dense)
            wanting = [c for c in wanting if c.goes_on]

    def _run(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> tuple[SampledTokens, dict[int, int]]:
        """Run the pass. Returns what it says of all guesses, and where each row's begin.

        Under penalties a choice waits for the guesses before it, as they are counted.
        """
        specs: list[SamplingSpec] = []
        first: dict[int, int] = {}
        for row in starts:
            first[row] = len(specs)
            masks = [self._mask] * (chains[row].depth - 1)
            for choose in hinted(self._rows.row_specs(row, masks), self._rows, row, UNKNOWING_GAIN):
                waits = self._dense or choose.params.penalised
                specs.append(choose._replace(kind="logits" if waits else choose.kind, margin=True))
        spans = [(row, start, int(self._rows.length[row]) - start) for row, start in starts.items()]
        packed, features = self._masked(spans, [chains[row].depth for row in starts])
        return self._head.run(packed, features, self._kv, specs)[0], first

    def _masked(
        self, known: Sequence[tuple[int, int, int]], depths: Sequence[int]
    ) -> tuple[Packed, NDArray[float32]]:
        """Return a pass over known tokens of rows (row, start, count) and masks for all guesses but the first."""
        spans: list[Span] = [
            (*part, [self._mask] * (depth - 1)) for part, depth in zip(known, depths, strict=True)
        ]
        return self._pack(spans, depths), self._read(spans, {row: self._mask_feature for row, *_ in known})


def _already(found: SampledTokens, _: Sequence[SamplingSpec]) -> SampledTokens:
    """Stand for a pass that has been run."""
    return found


class RelayHeadDrafter(ParallelHeadDrafter):
    """Drafts all tokens in one pass, and tells each of those before it."""

    hint_gain = 6.0
    recycled_gains = RecycledGains(pair=6.0, far_pair=2.0, token=3.0)

    def __init__(self, options: HeadOptions, target: Target, head: Head) -> None:
        super().__init__(options, target, head)
        self._normed: dict[int, NDArray[floating]] = {}  # row -> [depth, width] what the pass made of its places
        self._told: dict[int, NDArray[floating]] = {}  # row -> [relay_size] what its newest guess was told

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        at_once = self._run_in_turn if self._head.in_turn else None
        draft_in_turn(self._rows, chains, starts, partial(self._run_next, chains), at_once, dense=self._dense)

    def _run_in_turn(
        self, spans: Sequence[Span], specs: Sequence[SamplingSpec], ends: Sequence[StepLimit]
    ) -> SampledTokens:
        assert self._head.in_turn is not None
        packed, features = self._masked([span[:3] for span in spans], [end.depth for end in ends])
        return self._head.in_turn(packed, features, self._kv, specs, ends)

    def _run_next(
        self, chains: Mapping[int, Chain], spans: Sequence[Span], specs: Sequence[SamplingSpec]
    ) -> SampledTokens:
        """Choose the next guess of each row, see `RunSpans`."""
        number = len(chains[spans[0][0]].token_ids)  # of each one's guesses so far: they go on together
        if number == 0:
            return self._run_first(spans, specs, [chains[row].depth for row, *_ in spans])
        rows = [row for row, *_ in spans]
        newest = np.array([guesses[-1] for *_, guesses in spans], np.int64)
        told = np.stack([self._told[row] for row in rows])
        first, normed = (np.stack([self._normed[row][place] for row in rows]) for place in (0, number))
        chosen, told = self._head.relay(first, normed, (newest, told), specs)
        self._told = dict(zip(rows, told, strict=True))
        return chosen

    def _run_first(
        self, spans: Sequence[Span], specs: Sequence[SamplingSpec], depths: Sequence[int]
    ) -> SampledTokens:
        """Run the pass, keep what it makes of every place, and choose each row's first guess."""
        packed, features = self._masked([span[:3] for span in spans], depths)
        for_all = [choose for choose, depth in zip(specs, depths, strict=True) for _ in range(depth)]
        chosen, normed = self._head.run(packed, features, self._kv, for_all)
        ends = np.cumsum(depths).tolist()
        first = [end - depth for end, depth in zip(ends, depths, strict=True)]
        rows = [row for row, *_ in spans]
        self._normed = {row: normed[a:b] for row, a, b in zip(rows, first, ends, strict=True)}
        _, told = self._head.relay(normed[first], normed[first], None, ())
        self._told = dict(zip(rows, told, strict=True))
        return pick(chosen, first)
