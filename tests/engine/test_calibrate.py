"""Measuring what steps cost where there is little room: for texts, for KV, in the queue."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from paceline.draft.lookup.suffix import SuffixDrafter
from paceline.engine.calibrate import Grid, calibrate
from tests.engine.same_text import PLAIN, Settings, make_engine

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

MANY = Grid(num_rows=(1, 4, 16), ks=(0, 1, 3), drafter_ks=(1, 3), repeats=2, seconds=60.0)
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


@pytest.mark.parametrize(("num_pages", "most"), [(10, 4), (20, 4), (31, 16)])
def test_rows_for_which_there_are_no_pages_are_left_out(num_pages: int, most: int) -> None:
    """A row is given a page to grow into beside its own, so that 31 pages are for 16 rows."""
    engine = make_engine("draft-model:model=noisy,k=4", Settings(num_pages=num_pages))
    found = calibrate(engine, MANY)
    assert max(found.cost.drafters[0].by_rows[0].counts) == most
    assert min(found.cost.target.by_tokens.counts) == 1
    assert engine.stats().preemptions == 0
    engine.check()


def test_a_short_queue_does_not_keep_rows_from_being_measured() -> None:
    engine = make_engine("draft-model:model=noisy,k=4", PLAIN)
    engine.scheduler.limits = replace(engine.scheduler.limits, max_queued_tokens=6)
    found = calibrate(engine, MANY)
    assert 16 in found.cost.target.by_tokens.counts
    assert max(found.cost.drafters[0].by_rows[0].counts) == 16
