"""Branches in a pass: rows of their own, over pages of their own.

A branch leaves its row's chain at some token. In the pass it is one more row. It reads the row's own pages before
the page of its first token, and has pages of its own from that page on. Tokens before the branch in this page are
copied to it: committed tokens before the pass, tokens of the pass itself when they are written
(`Packed.copies`). So each token finds the keys and values of its ancestors, and of no other token, at the same
places in pages as in plain decoding: a kernel needs no mask, and sums up the same numbers in the same order.

Once a branch is kept, its pages are copied over the row's pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.backend.seam import KV
from paceline.core.nouns import PAGE_TOKENS, Draft, Scores, noun
from paceline.core.tree import ROOT
from paceline.core.tree_drafts import with_most

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.rows import Rows
    from paceline.backend.seam import Packed
    from paceline.core.nouns import Batch, RowDraft, RowVerdict, Taps, Verdict

MAX_BRANCH_TOKENS = 16  # most tokens of branches in a pass: beyond a few rows branches do not pay
PAGES_EACH = 2  # pages of a branch, which has at most one page's tokens, as a chain has
NUM_BRANCH_PAGES = MAX_BRANCH_TOKENS * PAGES_EACH


class CopiesPages(KV, Protocol):
    """Keys and values whose pages can be copied within the store."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page over another, between passes that touch them."""


@noun
class _RowBranches:
    """Branches of one row in the pass that scores them."""

    newest: int  # index of the row's newest token in the pass
    tokens: dict[int, int]  # index among the branches' tokens -> index in the pass
    pages: dict[int, tuple[int, list[int]]]  # the same index -> index of the branch's first own page, own pages


class BranchPages:
    """Pages of branches, and where the branches of open passes are."""

    def __init__(self, kv: CopiesPages, first_page: int) -> None:
        """first_page: first of the `NUM_BRANCH_PAGES` at the end of the store."""
        self._kv = kv
        self._free = list(range(first_page, first_page + NUM_BRANCH_PAGES))
        self._held: dict[int, list[int]] = {}  # row -> pages of its branches
        self._open: dict[int, _RowBranches] = {}  # row -> its branches in an open pass

    # Before a pass -------------------------------------------------------------------------------

    def fit(self, rows: Rows, batch: Batch, drafted: Sequence[RowDraft]) -> Draft:
        """Return drafts without branches that have no room, or that rows may not have.

        Rows with penalties or a grammar get chains, as their choice depends on the tokens before it. All rows get
        chains if a row of the batch has a grammar, or scores its prompt.
        """
        room = 0 if rows.grammars.states or rows.num_scored(batch) else len(self._free) // PAGES_EACH
        fitted: list[RowDraft] = []
        for r, d in zip(batch.rows, drafted, strict=True):
            may = d.branches is not None and r.decodes and rows.may_branch(r.row)
            fitted.append(with_most(d, room if may else 0))
            room -= fitted[-1].num_branch_tokens
        return Draft(tuple(fitted), branched=any(d.branches is not None for d in fitted))

    def pack(self, batch: Batch, draft: Draft, packed: Packed) -> Packed:
        """Add a draft's branches to a pass, behind all rows."""
        packing = _Packing(packed)
        for index, (r, d) in enumerate(zip(batch.rows, draft.rows, strict=True)):
            self.release(r.row)  # pages left by a pass that failed
            packing.want_row(1 + len(d) if r.samples else 0)
            if d.branches is not None:
                self._open[r.row] = found = self._pack_row(r.row, index, d, packing)
                packing.wanted += [found.tokens[i] for i in range(d.num_branch_tokens)]
        return packing.packed()

    def _pack_row(self, row: int, index: int, drafted: RowDraft, packing: _Packing) -> _RowBranches:
        branches, num_chain = drafted.branches, len(drafted)
        assert branches is not None
        newest = int(packing.before.cu_len[index + 1]) - num_chain - 1
        start = int(packing.before.positions[newest])
        tokens = {node: newest + 1 + node for node in range(ROOT, num_chain)}  # of the tree -> index in the pass
        found = _RowBranches(newest, {}, {})
        inner = set(branches.parents)
        for leaf in range(num_chain, num_chain + drafted.num_branch_tokens):
            if leaf in inner:
                continue
            path = [ROOT, *branches.path(leaf, num_chain)]
            leaves_at = next(depth for depth, node in enumerate(path) if node >= num_chain)
            first, end = (start + leaves_at) // PAGE_TOKENS, (start + len(path) - 1) // PAGE_TOKENS + 1
            own = self._take(row, end - first)
            pages = packing.before.pages[index].copy()
            if first * PAGE_TOKENS < start:
                self._kv.copy_page(int(pages[first]), own[0])
            pages[first:end] = own
            packing.begin_row(pages)
            for place, node in enumerate(path, start):
                if node not in tokens:
                    tokens[node] = packing.add(branches.token_ids[node - num_chain], place)
                elif place >= first * PAGE_TOKENS:
                    packing.copy(tokens[node], place)
                if node >= num_chain:
                    found.pages.setdefault(node - num_chain, (first, own))
            packing.end_row()
        found.tokens.update({node - num_chain: at for node, at in tokens.items() if node >= num_chain})
        return found

    def _take(self, row: int, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        self._held.setdefault(row, []).extend(taken)
        return taken

    # After it ------------------------------------------------------------------------------------

    def keep(self, rows: Rows, batch: Batch, draft: Draft, scores: Scores, verdict: Verdict) -> Scores:
        """Give rows the keys and values of kept branches, before they advance.

        All pages of branches are given back. Returns scores for drafters: choices along chains, and taps along
        kept paths.
        """
        positions: list[int] = []
        cu_len = [0]
        for index, (r, d, v) in enumerate(zip(batch.rows, draft.rows, verdict.rows, strict=True)):
            start = scores.cu_len[index]
            end = scores.cu_len[index + 1] - d.num_branch_tokens
            positions += range(start, end)
            cu_len.append(len(positions))
            if v.off_chain:
                self._move_pages(rows, r.row, v)
                if scores.taps is not None:
                    self._move_taps(self._open[r.row], v, scores.taps)
            self.release(r.row)
        specs = [scores.specs[at] for at in positions]
        return Scores(cu_len, specs, scores.chosen[positions], taps=scores.taps, touched=scores.touched)

    def _move_taps(self, at: _RowBranches, verdict: RowVerdict, taps: Taps) -> None:
        for depth, i in enumerate(verdict.off_chain, verdict.num_on_chain + 1):
            for states in taps.states.values():
                states[at.newest + depth] = states[at.tokens[i]]

    def _move_pages(self, rows: Rows, row: int, verdict: RowVerdict) -> None:
        first, own = self._open[row].pages[verdict.off_chain[-1]]
        last = (rows.known_len(row) - 1 + verdict.num_accepted) // PAGE_TOKENS
        for source, target in zip(own, rows.page_ids(row, first, last + 1), strict=False):
            self._kv.copy_page(source, target)

    def release(self, row: int) -> None:
        """Give back the pages of a row's branches, also of a pass that failed."""
        self._open.pop(row, None)
        self._free += self._held.pop(row, ())


class _Packing:
    """Packed tokens of a pass, to which rows are added."""

    def __init__(self, before: Packed) -> None:
        self.before = before
        self.wanted: list[int] = []
        self._num_wanted = 0  # wanted tokens of `before` that were taken over
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._cu_len: list[int] = []
        self._pages: list[NDArray[int64]] = []
        self._copies: list[tuple[int, int]] = []

    def want_row(self, count: int) -> None:
        """Take over the next `count` wanted tokens."""
        self.wanted += self.before.wanted[self._num_wanted : self._num_wanted + count].tolist()
        self._num_wanted += count

    def begin_row(self, pages: NDArray[int64]) -> None:
        """Begin a row with these pages."""
        self._pages.append(pages)

    def add(self, token_id: int, position: int) -> int:
        """Add a token to the newest row; return its index in the pass."""
        self._token_ids.append(token_id)
        self._positions.append(position)
        self._slots.append(self._slot(position))
        return len(self.before.token_ids) + len(self._token_ids) - 1

    def copy(self, token: int, position: int) -> None:
        """Copy a token of another row to a position of the newest row, too."""
        self._copies.append((token, self._slot(position)))

    def _slot(self, position: int) -> int:
        return int(self._pages[-1][position // PAGE_TOKENS]) * PAGE_TOKENS + position % PAGE_TOKENS

    def end_row(self) -> None:
        """End the newest row."""
        self._cu_len.append(len(self.before.token_ids) + len(self._token_ids))

    def packed(self) -> Packed:
        """Return all tokens."""
        b, first_keys = self.before, self.before.first_keys
        assert first_keys is None, "a target's rows see all keys"
        return replace(
            b,
            token_ids=np.append(b.token_ids, self._token_ids).astype(np.int64),
            positions=np.append(b.positions, self._positions).astype(np.int64),
            slots=np.append(b.slots, self._slots).astype(np.int64),
            cu_len=np.append(b.cu_len, self._cu_len).astype(np.int64),
            pages=np.concatenate((b.pages, np.array(self._pages, np.int64))),
            wanted=np.array(self.wanted, np.int64),
            copies=np.array(self._copies, np.int64).reshape(-1, 2),
        )


def without_branches(drafted: Sequence[RowDraft]) -> Draft:
    """Return only the chains of drafts."""
    return Draft(tuple(with_most(d, 0) for d in drafted))
