"""Per-row state of a backend: everything about a running request that depends on outcomes.

The scheduler names rows and bounds; only here is it known how long a row really is, which token is its newest
and where its tokens go. A backend on a device keeps its own copy of this and reveals it late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.packed import Packed
from paceline.core.history import History, choose_kind
from paceline.core.nouns import PAGE_TOKENS, SamplingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    Span = tuple[int, int, int, Sequence[int]]  # (row, start, num_known, guesses)

    from paceline.core.nouns import Admission, Batch, BatchRow, ChooseKind, Draft, Request, Verdict

SLACK_TOKENS = 64  # a row may overshoot its limit by the drafts of its last passes


@dataclass(frozen=True, slots=True, eq=False)
class _How:
    """How a row's tokens are chosen."""

    request: Request
    kind: ChooseKind
    history: History
    stop_ids: frozenset[int]  # what ends its answer, if not banned yet

    def after(self, length: int, guesses: Sequence[int], *, margin: bool = False) -> SamplingSpec:
        """Return it for the token after so many committed ones and some guesses."""
        r, edits = self.request, None
        if not self.history.never_edits:
            edits = self.history.edits(guesses, length - len(r.prompt_ids), self.stop_ids)
        return SamplingSpec(self.kind, r.params, r.seed, r.choice, length + len(guesses), edits, margin)

    def after_each(self, length: int, guesses: Sequence[int], *, margin: bool) -> list[SamplingSpec]:
        """Return it for the token after so many committed ones, and after each guess. [1 + num_guesses]"""
        if not self.history.never_edits:
            return [self.after(length, guesses[:n], margin=margin) for n in range(len(guesses) + 1)]
        r = self.request
        of_all = self.kind, r.params, r.seed, r.choice
        return [SamplingSpec(*of_all, length + n, None, margin) for n in range(len(guesses) + 1)]


class Rows:
    """Tokens, lengths and page tables of the rows of an engine.

    A decode row's newest token has no KV yet: `computed == length - 1` for it in the target's store.
    """

    def __init__(
        self, num_rows: int, max_len: int, eos_ids: frozenset[int], *, law_needs_probs: bool = False
    ) -> None:
        width = max_len + SLACK_TOKENS
        self.token_ids = np.zeros((num_rows, width), np.int64)
        self.length = np.zeros(num_rows, np.int64)  # [num_rows] committed tokens
        self.computed = np.zeros(num_rows, np.int64)  # [num_rows] tokens whose target KV is there
        self.pages = np.zeros((num_rows, -(-width // PAGE_TOKENS)), np.int64)
        self.requests: list[Request | None] = [None] * num_rows
        self._how: list[_How | None] = [None] * num_rows
        self._texts: list[kernels.TextIndex | None] = [None] * num_rows
        self._eos_ids = eos_ids
        self._law_needs_probs = law_needs_probs

    @property
    def num_rows(self) -> int:
        """Rows there are, in use or not."""
        return len(self.length)

    def tokens(self, row: int) -> NDArray[int64]:
        """Return a row's committed tokens. [length] int64, a view."""
        return self.token_ids[row, : self.length[row]]

    def text(self, row: int) -> kernels.TextIndex:
        """Return the index of a row's committed tokens: who asks for none pays for none."""
        return self.texts([row])[0]

    def texts(self, rows: Sequence[int]) -> list[kernels.TextIndex]:
        """Return the same of several rows."""
        texts = [self._texts[row] or self._new_text(row) for row in rows]
        kernels.extend_rows(texts, rows, self.token_ids, self.length)
        return texts

    def _new_text(self, row: int) -> kernels.TextIndex:
        request = self.requests[row]
        assert request is not None
        most = len(request.prompt_ids) + (request.params.max_tokens or 0)
        text = self._texts[row] = kernels.TextIndex(min(most, self.token_ids.shape[1]))
        return text

    def apply(self, batch: Batch) -> None:
        """Take in the births and the new pages of a step."""
        for admission in batch.admissions:
            self._admit(admission)
        for r in batch.rows:
            if r.new_pages:
                end = r.num_kept_pages + len(r.new_pages)
                self.pages[r.row, r.num_kept_pages : end] = r.new_pages

    def _admit(self, admission: Admission) -> None:
        row, request = admission.row, admission.request
        known, prompt_len = admission.token_ids, len(request.prompt_ids)
        self.token_ids[row, : len(known)] = known
        self.length[row] = len(known)
        self.computed[row] = admission.cached_len
        self.pages[row, : len(admission.pages)] = admission.pages
        self.requests[row] = request
        self._texts[row] = None
        own_stops = frozenset(request.params.stop_token_ids)
        history = History(request.params, request.prompt_ids)
        history.append(known[prompt_len:])
        self._how[row] = _How(
            request=request,
            kind=choose_kind(request.params, self._law_needs_probs),
            history=history,
            stop_ids=own_stops if request.params.ignore_eos else own_stops | self._eos_ids,
        )

    # What a pass reads ---------------------------------------------------------------------------

    def pack(self, batch: Batch, draft: Draft) -> Packed:
        """Return the packed tokens of a target pass: each row's known tokens, then its drafts."""
        spans = [
            (r.row, self.computed.item(r.row), r.num_known, d.token_ids)
            for r, d in zip(batch.rows, draft.rows, strict=True)
        ]
        wanted = [1 + len(d) if r.samples else 0 for r, d in zip(batch.rows, draft.rows, strict=True)]
        return self.pack_spans(spans, wanted)

    def pack_spans(self, spans: Sequence[Span], wanted: Sequence[int], ahead: int = 0) -> Packed:
        """Pack `(row, start, num_known, guesses)` spans: committed tokens from `start` on, then guesses.

        `wanted[i]` counts the tokens at the end of span i whose hidden state is to be returned. The pages reach
        `ahead` tokens further than the spans.
        """
        ends = [start + num_known + len(guesses) for _, start, num_known, guesses in spans]
        num_tokens = sum(ends) - sum(start for _, start, _, _ in spans)
        num_pages = -(-(max(ends, default=0) + ahead) // PAGE_TOKENS)
        block = np.empty(3 * num_tokens + len(spans) + 1 + sum(wanted), np.int64)
        pages = np.empty((len(spans), num_pages), np.int64)
        kernels.pack_spans(self.token_ids, self.pages, list(spans), list(wanted), num_tokens, block, pages)
        two, three = 2 * num_tokens, 3 * num_tokens
        offsets_end = three + len(spans) + 1
        return Packed(
            token_ids=block[:num_tokens],
            positions=block[num_tokens:two],
            slots=block[two:three],
            cu_len=block[three:offsets_end],
            pages=pages,
            wanted=block[offsets_end:],
        )

    def pack_spans_slow(self, spans: Sequence[Span], wanted: Sequence[int], ahead: int = 0) -> Packed:
        """Return what `pack_spans` returns, plainly."""
        cu_len = np.zeros(len(spans) + 1, np.int64)
        np.cumsum([num_known + len(guesses) for _, _, num_known, guesses in spans], out=cu_len[1:])
        token_ids = np.empty(cu_len[-1], np.int64)
        positions = np.empty_like(token_ids)
        for (row, start, num_known, guesses), low, high in zip(spans, cu_len, cu_len[1:], strict=False):
            token_ids[low : low + num_known] = self.token_ids[row, start : start + num_known]
            token_ids[low + num_known : high] = guesses
            positions[low:high] = np.arange(start, start + high - low)
        rows = np.array([span[0] for span in spans], np.int64)
        last = np.array([span[1] for span in spans], np.int64) + np.diff(cu_len)
        num_pages = int(-(-(last.max(initial=0) + ahead) // PAGE_TOKENS))
        token_rows = np.repeat(rows, np.diff(cu_len))
        slots = self.pages[token_rows, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        ends = [np.arange(high - n, high) for high, n in zip(cu_len[1:], wanted, strict=True) if n]
        return Packed(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            cu_len=cu_len,
            pages=self.pages[rows, :num_pages],
            wanted=np.concatenate(ends) if ends else np.empty(0, np.int64),
        )

    def specs(self, batch: Batch, draft: Draft) -> tuple[list[int], list[SamplingSpec]]:
        """Return cu_len and, for every scored position, how the target's token is chosen there."""
        cu_len, specs = [0], []
        for r, d in zip(batch.rows, draft.rows, strict=True):
            if r.samples:
                specs += self.row_specs(r.row, d.token_ids)
            cu_len.append(len(specs))
        return cu_len, specs

    def row_specs(self, row: int, guesses: Sequence[int], *, margin: bool = False) -> list[SamplingSpec]:
        """Return how tokens are chosen after a row's newest token and after each guess. [1 + num_guesses]

        margin: of whom it is asked how sure they are.
        """
        how = self._how[row]
        assert how is not None
        return how.after_each(self.length.item(row), guesses, margin=margin)

    def penalised(self, row: int) -> bool:
        """Whether how a row's tokens are chosen depends on which tokens come before them."""
        how = self._how[row]
        return how is not None and how.history.penalised

    def spec_after(self, row: int, guesses: Sequence[int]) -> SamplingSpec:
        """Return how the token after a row's committed tokens and some guesses is chosen."""
        how = self._how[row]
        assert how is not None
        return how.after(self.length.item(row), guesses)

    # Commit --------------------------------------------------------------------------------------

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        """Append what each row gained and advance what is computed."""
        rows = zip(batch.rows, verdict.rows, strict=True)
        gained = [(r.row, r.num_known, v.token_ids) for r, v in rows]
        kernels.append_tokens(self.token_ids, self.length, self.computed, gained)
        for row, _, token_ids in gained:
            self._learn(row, token_ids)

    def _learn(self, row: int, token_ids: Sequence[int]) -> None:
        how = self._how[row]
        assert how is not None
        if not how.history.never_edits:
            how.history.append(token_ids)

    def commit_slow(self, batch: Batch, verdict: Verdict) -> None:
        """Do what `commit` does, plainly."""
        for r, v in zip(batch.rows, verdict.rows, strict=True):
            self._advance(r, v.token_ids)

    def _advance(self, batch_row: BatchRow, token_ids: Sequence[int]) -> None:
        row, gained = batch_row.row, len(token_ids)
        length = self.length.item(row)
        self.token_ids[row, length : length + gained] = token_ids
        self.length[row] = length + gained
        self.computed[row] += batch_row.num_known + max(0, gained - 1)
        self._learn(row, token_ids)

    def check(self) -> None:
        """Assert that lengths keep within the arrays."""
        assert (self.computed <= self.length).all()
        assert (self.length <= self.token_ids.shape[1]).all()
