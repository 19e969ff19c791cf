"""Block heads: drafters that guess a whole block of tokens in one pass.

The head's layers make keys and values of known tokens' features: the *context*, entries in the tokens' slots. Each
draft runs one block per row: the newest token, then mask tokens. The block's keys and values lie behind the
context: in the rest of the newest token's page, then in spare pages of the row. A block is always as long as in
training, however few guesses are wanted and pages held. The guesses are then chosen one after another, so that
hints and the head's corrector know the guesses before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from paceline.backend.seam import CorrectRequest, FedBack, Packed, PassRequest
from paceline.core.nouns import PAGE_TOKENS
from paceline.draft.autoregressive import draft_steps
from paceline.draft.heads.head_drafter import HeadDrafter
from paceline.draft.hints import RecycledGains

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backend.seam import BlockHeadRunner, HeadRunner, PassResult, Span, StepLimit
    from paceline.core.nouns import SamplingSpec
    from paceline.draft.autoregressive import Chain
    from paceline.draft.drafter import Target
    from paceline.draft.heads.asked_head import AskedHead
    from paceline.model.heads.checkpoint import Head


class BlockHeadDrafter(HeadDrafter):
    """Drafts a block in one pass, and chooses its tokens one after another."""

    entries_lag = 1  # the newest token's feature is not known before the target has read it
    hint_gain = 6.0
    recycled_gains = RecycledGains(pair=6.0, far_pair=2.0, token=3.0)

    def __init__(self, asked: AskedHead, target: Target, head: Head, runner: HeadRunner) -> None:
        super().__init__(asked, target, head, runner)
        assert head.config.block is not None, "the config of a block head has its shape"
        assert head.config.mask_token_id is not None, "and names its mask token"
        self._block = head.config.block
        self._mask = head.config.mask_token_id
        self._first_spare = target.num_pages + 1  # see `spare_pages`
        self._hidden: object = None  # of the places of all guesses, `PassResult.hidden`
        self._first: dict[int, int] = {}  # row -> its first place in `_hidden`
        self._state: object = None  # of the corrector behind the newest guesses, `PassResult.hidden`
        self._state_rows: dict[int, int] = {}  # row -> its row of `_state`

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        if missing := {row: count for row in starts if (count := self._entries.missing(row)) > 0}:
            self._make_entries(missing)
        all_steps = self._run_steps if self._head.capabilities.multi_step else None
        draft_steps(self._rows, chains, starts, partial(self._run_next, chains), all_steps, dense=self._dense)

    def _run_steps(
        self, spans: Sequence[Span], specs: Sequence[SamplingSpec], steps: Sequence[StepLimit]
    ) -> PassResult:
        packed = self._packed([row for row, *_ in spans], [limit.depth for limit in steps])
        return self._head.launch(PassRequest(packed, self._kv, specs, steps)).wait()

    def _run_next(
        self, chains: Mapping[int, Chain], spans: Sequence[Span], specs: Sequence[SamplingSpec]
    ) -> PassResult:
        """Choose the next guess of each row, see `RunSpans`."""
        rows = [row for row, *_ in spans]
        number = len(chains[rows[0]].token_ids)  # guesses of each row so far: all rows go on together
        if number == 0:
            self._run_block(rows, [chains[row].depth for row in rows])
        before = [guesses[-1] if guesses else int(self._rows.tokens(row)[-1]) for row, *_, guesses in spans]
        places = [self._first[row] + number for row in rows]
        state = FedBack(self._state, [self._state_rows[row] for row in rows])
        runner = cast("BlockHeadRunner", self._head)
        result = runner.correct(CorrectRequest(self._hidden, places, specs, before, state))
        self._keep_state(rows, result.hidden)
        return result

    def _run_block(self, rows: Sequence[int], depths: Sequence[int]) -> None:
        """Run the pass, and keep its output at every place."""
        request = PassRequest(self._packed(rows, depths), self._kv, ())
        self._hidden = self._head.launch(request).wait().hidden
        self._first = {row: sum(depths[:index]) for index, row in enumerate(rows)}
        self._keep_state(rows, np.zeros((len(rows), self._block.state_size), np.float32))

    def _keep_state(self, rows: Sequence[int], state: object) -> None:
        self._state, self._state_rows = state, {row: index for index, row in enumerate(rows)}

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
