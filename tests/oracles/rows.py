"""Readable twins of how rows are packed and advanced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.backend.seam import Packed
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.rows import Rows, TokenRows
    from paceline.backend.seam import Span
    from paceline.core.nouns import Batch, Verdict


def pack(rows: TokenRows, spans: Sequence[Span], wanted: Sequence[int], ahead: int = 0) -> Packed:
    """Return what `TokenRows.pack` returns, plainly."""
    cu_len = np.zeros(len(spans) + 1, np.int64)
    np.cumsum([num_known + len(guesses) for _, _, num_known, guesses in spans], out=cu_len[1:])
    token_ids = np.empty(cu_len[-1], np.int64)
    positions = np.empty_like(token_ids)
    for (row, start, num_known, guesses), low, high in zip(spans, cu_len, cu_len[1:], strict=False):
        token_ids[low : low + num_known] = rows.token_ids[row, start : start + num_known]
        token_ids[low + num_known : high] = guesses
        positions[low:high] = np.arange(start, start + high - low)
    in_pass = np.array([span[0] for span in spans], np.int64)
    last = np.array([span[1] for span in spans], np.int64) + np.diff(cu_len)
    num_pages = int(-(-(last.max(initial=0) + ahead) // PAGE_TOKENS))
    token_rows = np.repeat(in_pass, np.diff(cu_len))
    slots = rows.pages[token_rows, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    ends = [np.arange(high - n, high) for high, n in zip(cu_len[1:], wanted, strict=True) if n]
    return Packed(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        cu_len=cu_len,
        pages=rows.pages[in_pass, :num_pages],
        wanted=np.concatenate(ends) if ends else np.empty(0, np.int64),
    )


def commit(rows: Rows, batch: Batch, verdict: Verdict) -> None:
    """Do what `Rows.commit` does, plainly."""
    for r, v in zip(batch.rows, verdict.rows, strict=True):
        gained, length = len(v.token_ids), rows.length.item(r.row)
        rows.token_ids[r.row, length : length + gained] = v.token_ids
        rows.length[r.row] = length + gained
        rows.computed[r.row] += r.num_known + max(0, gained - 1)
        rows.count_tokens(r.row, v.token_ids)
