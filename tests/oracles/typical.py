"""Readable twin of `paceline.verify.typical`: probabilities by hand, the budget in fractions."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

from paceline.core.sampling import MIN_TEMPERATURE
from tests.oracles.sampling import choose_token, keep

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.core.nouns import SamplingSpec

import numpy as np


def judge(
    logits: Sequence[NDArray[floating]],
    specs: Sequence[SamplingSpec],
    drafts: Sequence[int],
    budget: float,
    num_tokens: int,
    num_changed: int,
    reach: float,
    ends: Collection[int],
) -> tuple[list[int], list[int]]:
    """Return a row's new tokens, and the places of those that are not the target's own.

    logits, specs: [1 + drafts] of each position.
    """
    written: list[int] = []
    changed: list[int] = []
    for place in range(len(drafts) + 1):
        own = choose_token(logits[place], specs[place])
        draft = drafts[place] if place < len(drafts) else None
        if draft == own:
            written.append(own)
            continue
        allowed = Fraction(Decimal(str(budget))) * (num_tokens + place + 1)
        fits = num_changed + len(changed) + 1 <= allowed
        if (
            draft is None
            or own in ends
            or draft in ends
            or not fits
            or not typical(logits[place], specs[place], draft, reach)
        ):
            return [*written, own], changed
        written.append(draft)
        changed.append(place)
    return written, changed


def typical(logits: NDArray[floating], spec: SamplingSpec, token_id: int, reach: float) -> bool:
    """Return whether a token's probability is at least exp(-reach) of the likeliest one's."""
    probs = probabilities(logits, spec)
    return probs[token_id] > 0 and probs[token_id] >= math.exp(-reach) * max(probs)


def probabilities(logits: NDArray[floating], spec: SamplingSpec) -> list[float]:
    """Return the target's distribution; at temperature 0 that of temperature 1."""
    params = spec.params
    z = [float(x) for x in logits]
    if spec.edits is not None:
        for token_id, scale, add in zip(spec.edits.ids, spec.edits.scale, spec.edits.add, strict=True):
            x = z[token_id]
            z[token_id] = (x / float(scale) if x > 0 else x * float(scale)) + float(add)
    if not params.greedy:
        z = [x / max(params.temperature, MIN_TEMPERATURE) for x in z]
    ids = range(len(z)) if params.greedy else keep(np.array(z), params).tolist()
    weights = {i: math.exp(z[i] - max(z)) for i in ids}
    whole = sum(weights.values())
    return [weights.get(i, 0.0) / whole for i in range(len(z))]
