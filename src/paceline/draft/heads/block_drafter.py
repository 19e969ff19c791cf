"""Block heads: drafters that guess a whole block of tokens in one pass.

The keys and values that its layers make of known tokens' features, the *context*, are entries in the tokens'
slots. Each draft runs one block per row: the newest token, then mask tokens. What it writes lies in the slots
behind the context, and in spare pages of the row behind the newest token's page: a block is as long as it was
trained, however many of its guesses are wanted and pages held. The guesses are then chosen one after another, so
that hints and the head's corrector know those before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.backend.seam import FedBack, Packed, PassRequest, RelayRequest
from paceline.core.nouns import PAGE_TOKENS
from paceline.draft.heads.parallel import RelayHeadDrafter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backend.seam import HeadRunner, PassResult, Span, StepLimit
    from paceline.core.nouns import SamplingSpec
    from paceline.draft.autoregressive import Chain
    from paceline.draft.drafter import Target
    from paceline.draft.heads.asked_head import AskedHead
    from paceline.model.heads.checkpoint import Head


class BlockHeadDrafter(RelayHeadDrafter):
    """Drafts a block in one pass, and chooses its tokens one after another."""

    entries_lag = 1  # the newest token's feature is not known before the target has read it

    def __init__(self, asked: AskedHead, target: Target, head: Head, runner: HeadRunner) -> None:
        assert head.config.block is not None, "the config of a block head has its shape"
        self._block = head.config.block
        super().__init__(asked, target, head, runner)
        self._first_spare = target.num_pages + 1  # see `spare_pages`

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        if missing := {row: count for row in starts if (count := self._entries.missing(row)) > 0}:
            self._make_entries(missing)
        super()._draft(chains, starts)

    def _masked(
        self,
        known: Sequence[tuple[int, int, int]],
        depths: Sequence[int],
        specs: Sequence[SamplingSpec],
        steps: Sequence[StepLimit] = (),
    ) -> PassRequest:
        """Return a pass over a block of each row. depths: guesses wanted of each."""
        return PassRequest(self._packed([row for row, *_ in known], depths), self._kv, specs, steps)

    def _packed(self, rows: Sequence[int], depths: Sequence[int]) -> Packed:
        size, num_rows = self._block.size, len(rows)
        anchors = np.array([self._rows.known_len(row) - 1 for row in rows], np.int64)
        tokens = np.full((num_rows, size), self._mask, np.int64)
        tokens[:, 0] = [self._rows.tokens(row)[-1] for row in rows]
        positions = anchors[:, None] + np.arange(size)
        pages = np.zeros((num_rows, int(positions.max()) // PAGE_TOKENS + 1), np.int64)
        for index, row in enumerate(rows):
            own = self._rows.page_ids(row, 0, int(anchors[index]) // PAGE_TOKENS + 1)
            pages[index, : len(own)] = own
            last = int(positions[index, -1]) // PAGE_TOKENS
            spare = self._first_spare + row * self._block.spare_pages
            pages[index, len(own) : last + 1] = np.arange(spare, spare + last + 1 - len(own))
        slots = np.take_along_axis(pages, positions // PAGE_TOKENS, 1) * PAGE_TOKENS + positions % PAGE_TOKENS
        starts = np.arange(num_rows + 1) * size
        firsts = starts[:-1] + self._block.first
        return Packed(
            token_ids=tokens.reshape(-1),
            positions=positions.reshape(-1),
            slots=slots.reshape(-1),
            cu_len=starts,
            pages=pages,
            wanted=np.concatenate([np.arange(i, i + depth) for i, depth in zip(firsts, depths, strict=True)]),
            first_keys=np.array([self._entries.first(row) for row in rows], np.int64),
        )

    def _run_first(
        self, spans: Sequence[Span], specs: Sequence[SamplingSpec], depths: Sequence[int]
    ) -> PassResult:
        """Run the pass, keep its output at every place, and choose each row's first guess."""
        rows = [row for row, *_ in spans]
        self._hidden = self._head.launch(self._masked([span[:3] for span in spans], depths, ())).wait().hidden
        first = [sum(depths[:index]) for index in range(len(depths))]
        self._first = dict(zip(rows, first, strict=True))
        newest = [int(self._rows.tokens(row)[-1]) for row in rows]
        nothing = FedBack(np.zeros((len(rows), self._block.state_size), np.float32), range(len(rows)))
        result = self._head.relay(RelayRequest(self._hidden, first, first, specs, (newest, nothing)))
        self._keep_messages(rows, result)
        return result
