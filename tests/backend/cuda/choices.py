"""Random logits and sampling specs, and the choices of the compiled code, for tests of choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.backend.sampling import with_hint
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_ahead, choose_token

TEMPERATURES = (0.0, 1e-7, 0.3, 0.7, 1.0, 1.5)


@dataclass(frozen=True)
class Choices:
    """Logits of some places and how to choose there."""

    logits: torch.Tensor  # [num_places, vocab]
    specs: list[SamplingSpec]  # [num_places]
    hints: dict[str, torch.Tensor] = field(default_factory=dict)  # of `choose`


def random_choices(
    seed: int,
    vocab: int,
    dtype: torch.dtype,
    *,
    hinted: bool = False,
    num_places: int = 20,
    temperatures: Sequence[float] = TEMPERATURES,
) -> Choices:
    """Return places of which a third have many ties."""
    chance = np.random.default_rng(seed)
    logits = chance.normal(0, 3, (num_places, vocab))
    logits[::3] = logits[::3].round()
    logits[1::4] -= np.where(chance.random(vocab) < 0.5, np.inf, 0) if vocab > 10 else 0
    specs = [
        SamplingSpec(
            "noisy",
            SamplingParams(temperature=float(chance.choice(temperatures))),
            seed=int(chance.integers(1 << 63)),
            choice=int(chance.integers(4)),
            position=int(chance.integers(100_000)),
        )
        for _ in range(num_places)
    ]
    hints = {}
    if hinted:
        hints["hint_ids"] = torch.from_numpy(chance.integers(-1, vocab, num_places))
        hints["hint_add"] = torch.from_numpy(chance.normal(2, 2, num_places).astype(np.float32))
    return Choices(torch.from_numpy(logits).to(dtype), specs, hints)


def broken_rows(dtype: torch.dtype) -> Choices:
    """Return rows of NaN, of infinities, and rows where some are left, each with and without noise."""
    rows = torch.zeros(6, 70, dtype=dtype)
    rows[0] = torch.nan
    rows[1] = -torch.inf
    rows[2, 3] = torch.inf
    rows[3, :69] = torch.nan
    rows[4, 1:] = -torch.inf
    rows[5, ::2] = torch.nan
    greedy, noisy = (
        [SamplingSpec("noisy", SamplingParams(temperature=t), seed=n) for n in range(6)] for t in (0.0, 0.9)
    )
    return Choices(rows.repeat(2, 1), greedy + noisy)


def expected(case: Choices) -> tuple[list[int], list[float]]:
    """Return the token ids and margins of each row alone."""
    ids, margins = [], []
    for index, (row, plain) in enumerate(zip(case.logits.numpy(), case.specs, strict=True)):
        spec = plain
        if case.hints and (hint := int(case.hints["hint_ids"][index])) >= 0:
            spec = with_hint(plain, hint, float(case.hints["hint_add"][index]))
        token_id, margin = choose_ahead(row, spec)
        assert token_id == choose_token(row, spec)
        ids.append(token_id)
        margins.append(margin)
    return ids, margins
