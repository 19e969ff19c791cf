"""Token ids from a pass's logits: rows of logits, hints to drafters, drafters' draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.backend.seam import PassResult
from paceline.core import sampling
from paceline.core.noise import Lane, key
from paceline.core.nouns import BROKEN, UNCHOSEN, Edits
from paceline.core.sampling import BrokenRow, choose_ahead, distribution

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline import kernels
    from paceline.core.nouns import ChooseKind, SamplingSpec


def logit_rows(specs: Sequence[SamplingSpec]) -> NDArray[int64]:
    """Return each position's row among the logits that its kind wants, or -1. [n]"""
    wanted = np.array([c.wants_logits for c in specs], bool)
    return np.where(wanted, np.cumsum(wanted) - 1, -1)


def pick(chosen: PassResult, places: Sequence[int]) -> PassResult:
    """Return a pass's result for some of its wanted tokens."""
    token_ids, margins = chosen.token_ids[places], None if chosen.margins is None else chosen.margins[places]
    if chosen.logits is None or chosen.logit_idx is None:
        return PassResult(token_ids, margins=margins)
    rows = chosen.logit_idx[places]
    idx = np.where(rows >= 0, np.cumsum(rows >= 0) - 1, -1)
    return PassResult(token_ids, chosen.logits[rows[rows >= 0]], idx, margins=margins)


def pointed(spec: SamplingSpec, pointer: kernels.TokenHints | None, guesses: Sequence[int]) -> SamplingSpec:
    """Return the spec of the draft after some guesses, with its pointer's hint."""
    found = pointer and spec.edits is None and pointer.next_hint(np.array(guesses, np.int64))
    return with_hint(spec, *found) if found else spec


def with_hint(spec: SamplingSpec, token_id: int, add: float) -> SamplingSpec:
    """Add to a token's logit. Specs with penalties or biases are left as they are."""
    if spec.edits is not None:
        return spec
    kind: ChooseKind = "noisy" if spec.kind == "argmax" else spec.kind  # argmax reads no edits
    edits = Edits(np.array([token_id], np.int64), _ONE, np.array([add], np.float32))
    return spec._replace(kind=kind, edits=edits)


_ONE = np.ones(1, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Tokens that a drafter drew."""

    token_ids: list[int]  # [n]
    probs: list[NDArray[floating]] | None = None  # [n] of [vocab]: distribution of each draw, if the law needs it
    margins: list[float] | None = None  # [n] as `PassResult.margins`
    second_ids: list[int] | None = None  # [n] as `PassResult.second_ids`


def draw(
    run: Callable[[Sequence[SamplingSpec]], PassResult],
    specs: Sequence[SamplingSpec],
    depths: Sequence[int],
    *,
    dense: bool,
) -> Drawn:
    """Draw one draft token for each of `specs`, which `run` hands to a drafter's pass.

    Without `dense` a row draws as the target would, with the noise of the target's choice. With `dense` it draws
    with the noise of drafts (`depths[i]` drafts of this step come before it) and also returns the distribution
    [vocab] it drew from, as rejection sampling needs.
    """
    if dense:
        chosen = run([c._replace(kind="logits") for c in specs])
        assert chosen.logits is not None
        drawn = [_draw_dense(row, c, d) for row, c, d in zip(chosen.logits, specs, depths, strict=True)]
        return Drawn([token_id for token_id, _ in drawn], [probs for _, probs in drawn])
    chosen = run([c._replace(margin=True) for c in specs])
    token_ids: list[int] = chosen.token_ids.tolist()
    margins = [math.nan] * len(token_ids) if chosen.margins is None else chosen.margins.tolist()
    for index, row in enumerate([] if chosen.logit_idx is None else chosen.logit_idx.tolist()):
        if token_ids[index] == UNCHOSEN and chosen.logits is not None:
            token_ids[index], margin = choose_ahead(chosen.logits[row], specs[index])
            margins[index] = margin if math.isnan(margins[index]) else margins[index]
    second_ids = None if chosen.second_ids is None else chosen.second_ids.tolist()
    return Drawn(token_ids, margins=margins, second_ids=second_ids)


def _draw_dense(logits: NDArray[floating], spec: SamplingSpec, depth: int) -> tuple[int, NDArray[floating]]:
    try:
        ids, probs = distribution(logits, spec)
    except BrokenRow:
        return BROKEN, np.zeros(len(logits))
    full = np.zeros(len(logits), probs.dtype)
    full[ids] = probs
    return sampling.draw(full, key(spec.seed, spec.choice, Lane.DRAFT, spec.position, depth)), full
