"""Drafting on the device, for rows whose newest tokens the host does not know.

A program keeps, for each row, how many of its tokens have entries in a drafter's own store: keys and values of a
draft model's layers, or of a head's. It catches up on tokens that the last passes committed, then drafts. It reads
all of this from the device's rows; the host sends rows, depths, and a bound of the tokens committed since.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from paceline.backend.cuda.buckets import BUCKETS, bucket
from paceline.backend.cuda.choice import choose
from paceline.backend.cuda.device_memory import on_device
from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.device_rows import offsets, owners
from paceline.backend.cuda.kernel_launch import uses_kernels
from paceline.backend.cuda.late_counts import DraftGraphs, DraftShape, keep_drafts
from paceline.backend.cuda.late_hints import LateHints
from paceline.backend.cuda.row_launches import BegunRows, begin_by_kernel, guesses_by_kernel, pack_by_kernel
from paceline.core.nouns import PAGE_TOKENS, noun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backend.cuda.device_rows import DeviceRows
    from paceline.backend.cuda.late_counts import DraftOrders
    from paceline.backend.cuda.late_hints import Hint, HintTrail
    from paceline.backend.seam import HintRule, LateDraft


@noun
class LateInput:
    """Tokens that a draft pass reads on the device."""

    tokens: DevicePass
    before: torch.Tensor  # [num_tokens] slot of the token before each token; a head reads its taps
    fed_back: torch.Tensor | None = None  # [num_tokens, width] features of guesses, read instead of taps
    masked: torch.Tensor | None = None  # [num_tokens] True at places of tokens that are not known yet

    def wanting(self, wanted: torch.Tensor) -> LateInput:
        """Return the same input with these wanted tokens."""
        return replace(self, tokens=replace(self.tokens, wanted=wanted))


class LateRunner(Protocol):
    """A draft model or head that runs passes on the device."""

    parallel: bool  # makes all guesses in one pass

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Target's id of each logit; None: the same ids. [num_logits]"""

    def run_late(self, asked: LateInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the wanted tokens' states and the next guesses' features. [num_wanted, width] each"""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of states. [n, num_logits]"""

    def write_taps(self, taps: Mapping[int, torch.Tensor], slots: torch.Tensor) -> None:
        """Keep the taps of all tokens of a target pass, committed or not."""


class BegunDraft(NamedTuple):
    """Rows that draft, and what the host knows of them, on the device."""

    rows: torch.Tensor  # [n]
    depth: torch.Tensor  # [n]
    begun: BegunRows
    pages: torch.Tensor  # [n, num_pages]
    hints: HintTrail | None = None


class Program:
    """Catches up and drafts; see `LateProgram`."""

    def __init__(
        self,
        rows: DeviceRows,
        runner: LateRunner,
        scratch_slot: int,
        hints: HintRule,
        *,
        own_store: bool = True,
    ) -> None:
        """scratch_slot: slot of the drafter's store for entries that nothing reads.

        own_store: False where its entries are the target's own, which exist for all tokens except the newest.
        """
        n, device = rows.num_rows + 1, rows.device
        self._rows, self._runner, self._scratch, self._own_store = rows, runner, scratch_slot, own_store
        self._entries = torch.zeros(n, dtype=torch.int64, device=device)  # tokens with entries
        self._first_key = torch.zeros(n, dtype=torch.int64, device=device)  # tokens before it have no entries
        self._all_pages = rows.pages.shape[1]
        self._graphs = DraftGraphs(rows, self._draft_on_device)
        self._hints = LateHints(rows, hints) if hints.gain or hints.recycles else None
        rows.tap_sinks.append(runner.write_taps)

    def close(self) -> None:
        """Take no more taps, nor verdicts."""
        self._rows.tap_sinks.remove(self._runner.write_taps)
        if self._hints:
            self._hints.close()

    def admit(self, row: int, entries: int, first_key: int) -> None:
        """Begin a row whose tokens from `first_key` to `entries` have entries."""
        sent = self._send([[row], [entries], [first_key]])
        self._entries.index_copy_(0, sent[0], sent[1])
        self._first_key.index_copy_(0, sent[0], sent[2])
        if self._hints:
            self._hints.admit(row)

    @torch.inference_mode()
    def catch_up(self, counts: Mapping[int, int]) -> None:
        """Make `counts[row]` further entries of known tokens, and draft nothing."""
        sent = self._send([list(counts), list(counts.values())])
        rows = sent[0]
        with on_device(self._rows.device), self._rows.drafting():
            start = self._start(rows)
            d = self._begin(rows, sent[1], 1, self._all_pages)
            d = d._replace(begun=d.begun._replace(start=start, missing=sent[1]))
            self._runner.run_late(self._pack(d, sum(counts.values())).wanting(rows[:0]))
        self._entries.index_copy_(0, rows, start + sent[1])

    def draft(self, drafts: Sequence[LateDraft]) -> None:
        """Draft for rows: catch up, then guess up to the deepest of them."""
        bound, deepest = sum(d.bound for d in drafts), max(d.depth for d in drafts)
        longest = max(d.length for d in drafts) + deepest  # places of rows with fewer drafts reach as far
        shape = DraftShape(len(drafts), bound, deepest, -(-longest // PAGE_TOKENS))
        if self._graphs.pads and bound <= BUCKETS[-1]:
            num_rows = bucket(len(drafts))
            shape = DraftShape(num_rows, bucket(bound + num_rows - len(drafts)), deepest, self._all_pages)
        self._graphs.run(shape, drafts, captured=shape.bound <= BUCKETS[-1])

    def _draft_on_device(self, shape: DraftShape, orders: DraftOrders) -> None:
        """Draft on the device alone: the host sends nothing in between."""
        rows = orders.rows
        hints = self._hints.begin(rows, shape.num_pages) if self._hints else None
        d = self._begin(rows, orders.depth, shape.deepest, shape.num_pages)._replace(hints=hints)
        guess = self._guess_at_once if self._runner.parallel else self._guess_in_turn
        token_ids, margins = guess(d, shape.bound, shape.deepest)
        keep_drafts(self._rows.on_device, orders, token_ids, margins)
        self._entries.index_copy_(0, rows, self._num_read(d))  # last: failed drafting leaves entries as they were

    def _num_read(self, d: BegunDraft) -> torch.Tensor:
        """Return how many of each row's tokens have entries once they were drafted for. [n]"""
        return d.begun.length

    def _begin(self, rows: torch.Tensor, depth: torch.Tensor, deepest: int, num_pages: int) -> BegunDraft:
        """Look up what drafting needs of rows. num_pages: pages of the longest row."""
        state = self._rows.on_device
        pages = state.pages[:, :num_pages].index_select(0, rows)
        if uses_kernels(rows):
            entries = self._entries if self._own_store else None
            begun = begin_by_kernel(state, rows, entries, self._first_key, deepest)
            return BegunDraft(rows, depth, begun, pages)
        length = state.length[rows]
        missing = (length - self._start(rows)).clamp(min=1)
        each = torch.arange(len(rows) + 1, device=rows.device)
        positions = length + torch.arange(deepest, device=rows.device)[:, None]
        specs, start = state.specs(rows, length), length - missing
        begun = BegunRows(length, missing, start, self._first_key[rows], each, positions, specs)
        return BegunDraft(rows, depth, begun, pages)

    def _start(self, rows: torch.Tensor) -> torch.Tensor:
        """Return each row's first token without an entry. [n]"""
        if not self._own_store:
            return self._rows.on_device.computed[rows]
        return torch.maximum(self._entries[rows], self._first_key[rows])

    # The passes ------------------------------------------------------------------------------------

    def _guess_in_turn(self, d: BegunDraft, bound: int, deepest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return guesses and margins, [n, deepest] each, one pass after another."""
        states, fed_back = self._runner.run_late(self._pack(d, bound))
        found = [self._choose_next(states, d, 0)]
        for index in range(1, deepest):
            asked = self._guesses(d, found[-1][0], index, fed_back)
            states, fed_back = self._runner.run_late(asked)
            found.append(self._choose_next(states, d, index, found[-1][0]))
        return columns(found)

    def _guess_at_once(self, d: BegunDraft, bound: int, deepest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return guesses and margins, [n, deepest] each, of one pass with places for unknown tokens."""
        n, ahead = len(d.rows), deepest - 1
        asked = self._pack(d, bound + n * ahead, ahead, d.depth)
        states = self._runner.run_late(asked)[0].view(n, deepest, -1)
        if d.hints is None:
            return columns([self._choose(states[:, index], d, index) for index in range(deepest)])
        ids, add = d.hints.ahead(d.depth, deepest)
        hints = ((ids[:, index], torch.where(ids[:, index] < 0, 0.0, add)) for index in range(deepest))
        return columns([self._choose(states[:, index], d, index, hint) for index, hint in enumerate(hints)])

    def _pack(self, d: BegunDraft, bound: int, ahead: int = 0, depth: torch.Tensor | None = None) -> LateInput:
        """Pack each row's missing tokens and `ahead` places behind them.

        A row's last missing token and those places are wanted. bound: upper bound of the tokens. depth: [n] drafts
        of each row where places of unknown tokens follow; deeper places go to the scratch slot. None: no such
        places follow.
        """
        state, b = self._rows.on_device, d.begun
        if uses_kernels(d.rows):
            p = pack_by_kernel(state, d.rows, b, bound, ahead, depth, self._scratch)
            t = DevicePass(p.token_ids, p.positions, p.slots, p.cu_len, d.pages, p.wanted, b.first_keys)
            return LateInput(t, p.before, masked=p.masked)
        cu_len = offsets(b.missing + ahead)
        place = torch.arange(bound, device=d.rows.device)
        owner, at = owners(cu_len, place)
        real, row, known = place < cu_len[-1], d.rows[owner], b.missing[owner]
        position = torch.where(real, b.start[owner] + at, 0)
        masked = real & (at >= known)
        kept = real if depth is None else real & (at < known + depth[owner] - 1)
        wanted = cu_len[1:, None] - 1 - ahead + torch.arange(ahead + 1, device=place.device)
        tokens = DevicePass(
            token_ids=torch.where(real & ~masked, _at(state.token_ids, row, position), 0),
            positions=position,
            slots=torch.where(kept, self._slot(row, position), self._scratch),
            cu_len=cu_len,
            pages=d.pages,
            wanted=wanted.view(-1),
            first_keys=b.first_keys,
        )
        before = torch.where(real, self._slot(row, (position - 1).clamp(min=0)), self._scratch)
        return LateInput(tokens, before, masked=None if depth is None else masked)

    def _guesses(
        self, d: BegunDraft, token_ids: torch.Tensor, index: int, fed_back: torch.Tensor | None
    ) -> LateInput:
        """Return a pass over each row's guess number `index`, counted from 1."""
        state, length, each = self._rows.on_device, d.begun.length, d.begun.each
        if uses_kernels(d.rows):
            packed = guesses_by_kernel(state, d.rows, length, d.depth, token_ids, index, self._scratch)
        else:
            kept = index < d.depth  # places of deeper guesses have no page
            position = torch.where(kept, length + index - 1, length)
            slots = torch.where(kept, self._slot(d.rows, position), self._scratch)
            before = self._slot(d.rows, (position - 1).clamp(min=0))
            packed = token_ids.clamp(min=0), position, slots, before
        tokens = DevicePass(*packed[:3], each, d.pages, each[:-1], d.begun.first_keys)
        return LateInput(tokens, packed[3], fed_back)

    def _slot(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        pages = self._rows.on_device.pages
        return _at(pages, rows, positions // PAGE_TOKENS) * PAGE_TOKENS + positions % PAGE_TOKENS

    def _choose_next(
        self, states: torch.Tensor, d: BegunDraft, index: int, guess: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return guess number `index` and margins, with hints by the guess before it. [n] each"""
        return self._choose(states, d, index, d.hints.next(index, guess) if d.hints else None)

    def _choose(
        self, states: torch.Tensor, d: BegunDraft, index: int, hint: Hint | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return guesses and margins by states. [n] each"""
        return self._choose_among(self._runner.logits(states), d, index, hint)

    def _choose_among(
        self, logits: torch.Tensor, d: BegunDraft, index: int, hint: Hint | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return guesses and margins, under the noise of the target's own choices. [n] each"""
        specs = replace(d.begun.specs, position=d.begun.positions[index])
        ids, add = hint or (None, None)
        return choose(logits, specs, draft_ids=self._runner.draft_ids, hint_ids=ids, hint_add=add)

    def _send(self, columns: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(columns).to(self._rows.device, non_blocking=True)


def columns(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return guesses and margins of all depths, [n, depth] each."""
    return torch.stack([ids for ids, _ in found], 1), torch.stack([margins for _, margins in found], 1)


def _at(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return table[rows, columns.clamp(max=table.shape[1] - 1)]
