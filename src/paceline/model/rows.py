"""Per-row state of a backend: everything about a running request that depends on outcomes.

The scheduler names rows and bounds; only here is it known how long a row really is, which token is its newest
and where its tokens go. A backend on a device keeps its own copy of this and reveals it late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.history import History, choose_kind
from paceline.core.nouns import PAGE_TOKENS, Choose
from paceline.model.packed import Packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    Span = tuple[int, int, int, Sequence[int]]  # (row, start, num_known, guesses)

    from paceline.core.nouns import Admission, Batch, BatchRow, Draft, Request, Verdict

SLACK_TOKENS = 64  # a row may overshoot its limit by the drafts of its last passes


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
        self._histories: list[History | None] = [None] * num_rows
        self._stop_ids = [eos_ids] * num_rows  # what ends each row's answer, if not banned yet
        self._eos_ids = eos_ids
        self._law_needs_probs = law_needs_probs

    @property
    def num_rows(self) -> int:
        """Rows there are, in use or not."""
        return len(self.length)

    def tokens(self, row: int) -> NDArray[int64]:
        """Return a row's committed tokens. [length] int64, a view."""
        return self.token_ids[row, : self.length[row]]

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
        own_stops = frozenset(request.params.stop_token_ids)
        self._stop_ids[row] = own_stops if request.params.ignore_eos else own_stops | self._eos_ids
        history = History(request.params, request.prompt_ids)
        history.append(known[prompt_len:])
        self._histories[row] = history

    # What a pass reads ---------------------------------------------------------------------------

    def pack(self, batch: Batch, draft: Draft) -> Packed:
        """Return the packed tokens of a target pass: each row's known tokens, then its drafts."""
        spans = [
            (r.row, int(self.computed[r.row]), r.num_known, d.token_ids)
            for r, d in zip(batch.rows, draft.rows, strict=True)
        ]
        wanted = [1 + len(d) if r.samples else 0 for r, d in zip(batch.rows, draft.rows, strict=True)]
        return self.pack_spans(spans, wanted)

    def pack_spans(self, spans: Sequence[Span], wanted: Sequence[int], ahead: int = 0) -> Packed:
        """Pack `(row, start, num_known, guesses)` spans: committed tokens from `start` on, then guesses.

        `wanted[i]` counts the tokens at the end of span i whose hidden state is to be returned. The pages reach
        `ahead` tokens further than the spans.
        """
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

    def chooses(self, batch: Batch, draft: Draft) -> tuple[list[int], list[Choose]]:
        """Return cu_len and, for every scored position, how the target's token is chosen there."""
        cu_len, chooses = [0], []
        for r, d in zip(batch.rows, draft.rows, strict=True):
            if r.samples:
                chooses += self.row_chooses(r.row, d.token_ids)
            cu_len.append(len(chooses))
        return cu_len, chooses

    def row_chooses(self, row: int, guesses: Sequence[int]) -> list[Choose]:
        """Return how tokens are chosen after a row's newest token and after each guess. [1 + num_guesses]"""
        return [self.choose_after(row, guesses[:count]) for count in range(len(guesses) + 1)]

    def penalised(self, row: int) -> bool:
        """Whether how a row's tokens are chosen depends on which tokens come before them."""
        request = self.requests[row]
        return request is not None and request.params.penalised

    def choose_after(self, row: int, guesses: Sequence[int]) -> Choose:
        """Return how the token after a row's committed tokens and some guesses is chosen."""
        request, history = self.requests[row], self._histories[row]
        assert request is not None
        assert history is not None
        params, length = request.params, int(self.length[row])
        num_written = length - len(request.prompt_ids)
        return Choose(
            kind=choose_kind(params, self._law_needs_probs),
            params=params,
            seed=request.seed,
            choice=request.choice,
            position=length + len(guesses),
            edits=history.edits(guesses, num_written, self._stop_ids[row]),
        )

    # Commit --------------------------------------------------------------------------------------

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        """Append what each row gained and advance what is computed."""
        for r, v in zip(batch.rows, verdict.rows, strict=True):
            self._advance(r, v.token_ids)

    def _advance(self, batch_row: BatchRow, token_ids: Sequence[int]) -> None:
        row, gained = batch_row.row, len(token_ids)
        length = int(self.length[row])
        self.token_ids[row, length : length + gained] = token_ids
        self.length[row] = length + gained
        self.computed[row] += batch_row.num_known + max(0, gained - 1)
        history = self._histories[row]
        assert history is not None
        history.append(token_ids)

    def check(self) -> None:
        """Assert that lengths keep within the arrays."""
        assert (self.computed <= self.length).all()
        assert (self.length <= self.token_ids.shape[1]).all()
