"""Measuring what steps cost where there is little room: for texts, for KV, in the queue."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from paceline.draft.lookup.suffix import SuffixDrafter
from paceline.engine.calibrate import Grid, calibrate
from tests.engine.same_text import PLAIN, make_engine

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

ONE = Grid(num_rows=(1,), ks=(0,), drafter_ks=(), repeats=1, seconds=60.0)


def shorten(engine: Engine, max_len: int) -> Engine:
    """Admit texts of so many tokens only, fewer than a config may ask for: a model may have such a context."""
    engine.scheduler.limits = replace(engine.scheduler.limits, max_len=max_len)
    return engine


@pytest.mark.parametrize("max_len", range(9, 14))
def test_rows_that_end_in_the_last_step_leave_no_answer_behind(max_len: int) -> None:
    engine = shorten(make_engine("suffix:shared=4096,k=4", PLAIN), max_len)
    calibrate(engine, ONE)
    engine.step()
    drafter = engine.drafting.drafters["suffix"]
    assert isinstance(drafter, SuffixDrafter)
    assert not drafter._shared
