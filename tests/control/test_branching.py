"""How many branches are verified: as many as raise tokens per second, none beyond a few rows."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from paceline.control.acceptance import AcceptanceModel
from paceline.control.branching import MAX_ROWS, PATIENCE, PROBE_EVERY, BranchChances, Branching
from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.files import Profile, make_loop
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import StepView, Work
from paceline.control.protocols import StepTimes
from paceline.control.trace_files import Tracer, replay
from paceline.core.nouns import Batch, BatchRow, Draft, RowDraft, RowVerdict, Verdict
from paceline.core.tree import Branches
from paceline.core.tree_drafts import with_most

if TYPE_CHECKING:
    from pathlib import Path

NAME, DEPTH = "head", 4
INDICES = {NAME: 0}


def priced(per_token: float) -> OnlineCost:
    """A pass of 10 ms, and so many ms more for each token."""
    curve = Curve.of([1, 64], [0.01, 0.01 + 63e-3 * per_token])
    drafting = tuple(Curve.of([1], [1e-4 * depth]) for depth in range(1, DEPTH + 1))
    return OnlineCost(MeasuredCost(TargetCost(curve), (DraftCost(drafting),)))


def branching_at(per_token: float) -> Branching:
    return Branching(priced(per_token), [AcceptanceModel(8, DEPTH)], [8], INDICES)


def view_of(num_rows: int, prefill: int = 0) -> StepView:
    rows = np.arange(num_rows)
    return StepView(rows, np.full(num_rows, 100), np.full(num_rows, 16), Work(prefill))


def drafted(num_rows: int, confidence: float = 0.6) -> tuple[Batch, Draft]:
    rows = tuple(BatchRow(i, str(i), 1, DEPTH, True, 200, decodes=True) for i in range(num_rows))
    branches = Branches((11, 12, 13, 14), (-1, 0, 1, 2))
    one = RowDraft([1, 2, 3, 4], NAME, [confidence] * DEPTH, branches=branches)
    return Batch(0, rows), Draft((one,) * num_rows, branched=True)


def count_at(per_token: float, confidence: float = 0.6, num_rows: int = 1) -> int:
    draft = branching_at(per_token).choose(view_of(num_rows), *drafted(num_rows, confidence))
    assert draft.branched == any(d.branches for d in draft.rows)
    return sum(d.num_branch_tokens for d in draft.rows)


def test_the_dearer_a_token_the_fewer_branches_down_to_none() -> None:
    counts = [count_at(price) for price in (0.0, 0.05, 0.2, 0.5, 1.0, 3.0)]
    assert all(a >= b for a, b in pairwise(counts))
    assert counts[0] == 4
    assert counts[-1] == 0


def test_a_drafter_that_is_sure_of_its_first_choices_gets_no_branches() -> None:
    assert count_at(0.2, 0.999) == 0 < count_at(0.2, 0.55)


def test_the_first_branch_is_the_one_at_the_root() -> None:
    draft = branching_at(0.55).choose(view_of(1), *drafted(1))
    (one,) = draft.rows
    assert one.branches is not None
    assert one.branches.parents[0] == -1
    assert list(one.token_ids) == [1, 2, 3, 4]


def test_drafters_are_asked_in_steps_of_few_rows_and_seldom_where_it_does_not_pay() -> None:
    branching = branching_at(3.0)
    assert not branching.asks(view_of(MAX_ROWS + 1))
    assert not branching.asks(view_of(1, prefill=64))
    asked = []
    for _ in range(PATIENCE + 4 * PROBE_EVERY):
        asked.append(branching.asks(view_of(1)))
        if asked[-1]:
            branching.choose(view_of(1), *drafted(1))
    assert all(asked[:PATIENCE])
    assert sum(asked[PATIENCE:]) == 4
    assert branching.most(0) == 8


def test_chances_are_learnt_of_branches_that_were_not_verified() -> None:
    branching, (_, proposed) = branching_at(0.1), drafted(1)
    chains = Draft(tuple(with_most(d, 0) for d in proposed.rows))
    before = branching.chances[0](0.6)
    for _ in range(200):  # the first draft is kept, and the second is refused for its rival
        branching.learn(proposed, chains, Verdict((RowVerdict([1, 12], 1),)))
    assert branching.chances[0](0.6) == pytest.approx(0.5, abs=0.05)
    assert before < 0.3
    assert branching.chances[0](0.99) == BranchChances()(0.99)


def test_a_replay_learns_what_passes_with_branches_cost(tmp_path: Path) -> None:
    """The tokens of branches explain a part of a pass's time, there as in the run."""
    file, loops = tmp_path / "trace.jsonl", list[ClosedLoop]()
    profile, (batch, proposed) = Profile(priced(0.1).measured, (NAME,)), drafted(1)
    with file.open("w") as lines:
        tracer = Tracer(lines, profile, [NAME], 4, [DEPTH])
        loop = make_loop(profile, [NAME], 4, [DEPTH], tracer, branches=[4])
        loop.admit(0)
        count = 0
        for _ in range(40):
            loop.plan(view_of(1))
            draft = loop.trim(batch, proposed)
            count += sum(d.num_branch_tokens for d in draft.rows)
            loop.observe(batch, proposed, draft, Verdict((RowVerdict([1, 12], 1),)), StepTimes(4e-4, 0.0125, 1e-4))
    assert count > 40
    for _ in replay(file, lambda loop, _: loops.append(loop)):
        pass
    assert loop.cost is not None
    assert loops[-1].cost is not None
    work = Work(9, 0, 900, 900)
    assert loops[-1].cost.pass_s(work) == pytest.approx(loop.cost.pass_s(work), rel=1e-12)
