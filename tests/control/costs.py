"""Costs to test with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from tests.oracles.allocation import Drafts, in_order

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost

H100 = Path(__file__).parents[3] / "shared" / "data" / "dynamic_sd_h100_llama31_8b.json"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)


@st.composite
def measured_costs(draw: st.DrawFn, num_drafters: int = 2, max_depth: int = 4) -> MeasuredCost:
    """Any prices: curves that rise as they like, straight or in steps."""
    rise = st.floats(0, 2)
    target = Curve.of(
        TOKENS, np.cumsum([1.0, *(draw(rise) for _ in TOKENS[1:])]).tolist(), stepped=draw(st.booleans())
    )
    drafters = tuple(
        DraftCost(
            tuple(
                Curve.of([1, 4, 16], np.cumsum([draw(rise) for _ in range(3)]).tolist()) for _ in range(max_depth)
            )
        )
        for _ in range(num_drafters)
    )
    return MeasuredCost(TargetCost(target, 0.01, draw(st.floats(0, 1e-3)), draw(st.floats(0, 1e-3))), drafters)


def drafts_of(survival: np.ndarray, lengths: np.ndarray, drafters: np.ndarray | None = None) -> Drafts:
    """List all drafts of rows with these survival curves."""
    n, depth = survival.shape
    return in_order(survival, np.full(n, depth), lengths, np.zeros(n, np.int64) if drafters is None else drafters)
