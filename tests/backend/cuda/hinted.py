"""Hints on the device and on the host, for the same texts and guesses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st

from paceline import kernels
from paceline.backend.cuda.late_hints import LateHints
from paceline.backend.cuda.row_tensors import MAX_DRAFTS
from tests.backend.cuda.texts import rows_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.cuda.device_rows import DeviceRows
    from paceline.backend.seam import HintRule

texts_ = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=50), min_size=1, max_size=3)
guesses_ = st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=3, max_size=3)
Said = tuple[list[int], list[int], int]  # drafts, the target's choices there, and how many drafts it kept


def on_device(
    rows: DeviceRows, hints: LateHints, guesses: Sequence[Sequence[int]], num_pages: int = 4
) -> list[list[tuple[int, float]]]:
    """The hints to each row's guesses, one after another."""
    index, told = torch.arange(rows.num_rows), []
    trail = hints.begin(index, num_pages)
    for at in range(len(guesses[0]) + 1):
        guess = torch.tensor([g[at - 1] for g in guesses[: rows.num_rows]]) if at else None
        ids, add = trail.next(at, guess)
        told.append(list(zip(ids.tolist(), add.tolist(), strict=True)))
    return [list(row) for row in zip(*told, strict=True)]


def on_host(
    text: list[int], guesses: list[int], rule: HintRule, recycled: kernels.RecycledTokens | None
) -> list[tuple[int, float]]:
    """The same of one row."""
    index = kernels.TextIndex(64)
    index.extend(np.array(text))
    tail = np.array(text[-rule.max_match :])
    hints = kernels.TokenHints(index, tail, rule.gain, rule.min_match, rule.max_match)
    if recycled is not None:
        hints.add_recycled(recycled, (rule.pair, rule.far_pair, rule.token), len(text))
    every = [hints.next_hint(np.array(guesses[:at], np.int64)) for at in range(len(guesses) + 1)]
    return [(-1, 0.0) if one is None else one for one in every]


def say(rows: DeviceRows, hints: LateHints, said: Sequence[Said]) -> None:
    """Have the device learn what its target said of each row's drafts."""
    n = len(said)
    rows.on_device.sampling[:, 3] = 1  # the device chooses
    drafts = torch.zeros(n, MAX_DRAFTS, dtype=torch.int64)
    for row, (drafted, _, _) in enumerate(said):
        drafts[row, : len(drafted)] = torch.tensor(drafted)
    counts = [len(drafted) for drafted, _, _ in said]
    g: Any = SimpleNamespace(
        step=SimpleNamespace(rows=torch.arange(n)),
        first_place=torch.tensor([sum(counts[:row]) + row for row in range(n)]),
        num_drafts=torch.tensor(counts),
        drafts=drafts,
    )
    chosen = torch.tensor([token for _, choices, _ in said for token in choices])
    hints.learn(g, chosen, torch.tensor([kept + 1 for _, _, kept in said]))


@st.composite
def sayings(draw: st.DrawFn) -> list[list[Said]]:
    """What a target says of up to three rows' drafts, pass by pass."""
    tokens = st.integers(0, 2)
    passes = []
    for _ in range(draw(st.integers(1, 4))):
        of_rows = []
        for _ in range(3):
            drafted = draw(st.lists(tokens, min_size=1, max_size=5))
            choices = draw(st.lists(tokens, min_size=len(drafted) + 1, max_size=len(drafted) + 1))
            of_rows.append((drafted, choices, draw(st.integers(0, len(drafted)))))
        passes.append(of_rows)
    return passes


def hints_for(texts: list[list[int]], rule: HintRule) -> tuple[DeviceRows, LateHints]:
    """Rows of these texts, and hints to them."""
    rows = rows_with(texts)
    return rows, LateHints(rows, rule)
