"""Expectation of the step that is being taken in, for those who want to see it."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.controller import ClosedLoop
from paceline.control.goodput import Goodput
from paceline.control.policy import NONE
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


def expectation_of(controller: Controller) -> Expectation:
    """Return what a controller expects of its last plan. Call before it learns from that step."""
    if not isinstance(controller, ClosedLoop) or not isinstance(controller.policy, Goodput):
        return NOTHING
    planned = controller.planned
    if planned is None or not planned[0].num_rows:
        return NOTHING
    view, decision = planned
    choice = controller.policy.choice
    tokens = choice.expected_tokens(view, decision.drafters, decision.ks).tolist()
    no_ks, no_drafters = np.zeros(view.num_rows, np.int64), np.full(view.num_rows, NONE)
    plain_s = choice.cost.price(view.work + view.prefill, view.lengths, no_ks, no_drafters)
    row_tokens = dict(zip(view.rows.tolist(), tokens, strict=True))
    return Expectation(row_tokens, _finite(decision.seconds), _finite(plain_s))


def _finite(seconds: float) -> float | None:
    return float(seconds) if isfinite(seconds) and seconds > 0 else None
