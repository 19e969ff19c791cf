"""Expectation of a step, to be shown to users."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.controller import ClosedLoop
from paceline.control.goodput import Goodput
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.control.protocols import Controller


@noun
class Expectation:
    """Tokens expected of each row, and seconds of the step, with and without drafts."""

    row_tokens: Mapping[int, float]
    seconds: float | None
    plain_s: float | None


NOTHING = Expectation({}, None, None)  # of a controller that estimates nothing


def expectation_of(controller: Controller, verified: Mapping[int, int]) -> Expectation:
    """Return what a controller expects of a step it has not learnt from yet.

    verified: number of drafts that are scored, by row; drafting may have ended before the plan's bound.
    """
    if not isinstance(controller, ClosedLoop) or not isinstance(controller.policy, Goodput):
        return NOTHING
    planned = controller.planned
    if planned is None or not planned[0].num_rows:
        return NOTHING
    view, decision = planned
    choice, base = controller.policy.choice, view.work + view.prefill
    rows, no_ks = view.rows.tolist(), np.zeros(view.num_rows, np.int64)
    ks, drafters = np.array([verified.get(row, 0) for row in rows]), np.maximum(decision.drafters, 0)
    tokens = choice.expected_tokens(view, drafters, ks).tolist()
    seconds = choice.cost.price(base, view.lengths, ks, drafters)
    plain_s = choice.cost.price(base, view.lengths, no_ks, drafters)
    return Expectation(dict(zip(rows, tokens, strict=True)), _finite(seconds), _finite(plain_s))


def _finite(seconds: float) -> float | None:
    return float(seconds) if isfinite(seconds) and seconds > 0 else None
