"""Random drafts and choices, and the verdicts of the law, for tests of judges."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from paceline.core.nouns import BROKEN, UNCHOSEN, Draft, RowDraft, Scores
from paceline.verify.coupled import Coupled

Rows = list[tuple[list[int], list[int], bool]]  # drafts, the target's choices, does the row sample


@st.composite
def rows_of_drafts(draw: st.DrawFn) -> Rows:
    """Return rows whose drafts and choices often agree."""
    rows: Rows = []
    for _ in range(draw(st.integers(1, 6))):
        drafts = draw(st.lists(st.integers(0, 2), max_size=5))
        choices = [draw(st.sampled_from((d, d, d, 1, BROKEN))) for d in [*drafts, 0]]
        rows.append((drafts, choices, draw(st.booleans())))
    return rows


def arrays(rows: Rows, spare: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the arguments of `judge`. Places without drafts hold what could be kept by mistake."""
    depth = max(len(drafts) for drafts, *_ in rows) + spare
    chosen, first = [], []
    for _, choices, samples in rows:
        first.append(len(chosen) if samples else 0)
        chosen += choices if samples else []
    padded = [drafts + choices[len(drafts) :] + [1] * depth for drafts, choices, _ in rows]
    return (
        torch.tensor(chosen, dtype=torch.int64),
        torch.tensor(first),
        torch.tensor([len(drafts) for drafts, *_ in rows]),
        torch.tensor([row[:depth] for row in padded], dtype=torch.int64).view(len(rows), depth),
        torch.tensor([int(samples) for *_, samples in rows]),
    )


def expected(rows: Rows, spare: int = 0) -> tuple[list[list[int]], list[int]]:
    """Return the law's token ids, filled with UNCHOSEN, and their numbers."""
    sampling = [(drafts, choices) for drafts, choices, samples in rows if samples]
    lengths = [len(choices) if samples else 0 for _, choices, samples in rows]
    chosen = np.array([c for _, choices in sampling for c in choices], np.int64)
    draft = Draft(tuple(RowDraft(tuple(drafts)) for drafts, *_ in rows))
    scores = Scores(chosen=chosen, cu_len=[0, *np.cumsum(lengths).tolist()], specs=[])
    verdict = Coupled().judge(draft, scores)
    width = max(len(drafts) for drafts, *_ in rows) + spare + 1
    token_ids = [list(v.token_ids) for v in verdict.rows]
    return [ids + [UNCHOSEN] * (width - len(ids)) for ids in token_ids], [len(ids) for ids in token_ids]
