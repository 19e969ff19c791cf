"""The device counts the drafts of rows, and verifies the likeliest of a step within its budget."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.backend.cuda import late_counts
from paceline.backend.cuda.device_rows import allot, cut_to_budget, gather
from paceline.backend.cuda.graphs import Uncaptured
from paceline.backend.cuda.late_counts import DraftOrders, DraftShape, keep_drafts, orders_of
from paceline.backend.cuda.row_tensors import StepRows
from paceline.backend.cuda.step_graphs import StepGraphs
from paceline.backend.seam import LateDraft
from paceline.core.nouns import BROKEN, MOST_MARGIN, UNCHOSEN, Plan, RowPlan, Stop
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from tests.backend.cuda.texts import drafts_of, rows_with
from tests.engine.same_text import PLAIN, RestlessK, assert_same, make_engine, plain_answers, run
from tests.oracles import allotment as oracle

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.cuda.late_target import LateTarget
    from paceline.backend.cuda.step_graphs import StepOutputs
    from paceline.backend.target import ReadyPass
    from paceline.control.policy import StepView
    from paceline.core.nouns import Batch, Draft

chances = st.sampled_from([0.0, 0.3, 0.7, 1.0])  # few, so that drafts of equal chance are met
rows_ = st.lists(st.tuples(st.lists(chances, min_size=4, max_size=4), st.integers(0, 4)), min_size=1, max_size=6)


def fallen(row: list[float]) -> list[float]:
    """Chances that all drafts up to each are kept."""
    return torch.tensor(row, dtype=torch.float64).cumprod(0).tolist()


@given(rows=rows_, budget=st.integers(0, 30))
def test_the_likeliest_drafts_are_verified_and_each_row_keeps_a_prefix(
    rows: list[tuple[list[float], int]], budget: int
) -> None:
    alive, counts = [fallen(row) for row, _ in rows], [count for _, count in rows]
    given_ = torch.tensor(alive, dtype=torch.float64), torch.tensor(counts), torch.tensor([budget])
    taken = allot(*given_).tolist()
    assert taken == oracle.allot(alive, counts, budget)
    assert sum(taken) == min(budget, sum(counts))
    kept = sum(sum(row[:n]) for row, n in zip(alive, taken, strict=True))
    best = sorted((c for row, n in zip(alive, counts, strict=True) for c in row[:n]), reverse=True)[:budget]
    assert kept == pytest.approx(sum(best)), "no other choice keeps more"


@st.composite
def stops(draw: st.DrawFn) -> Stop | None:
    odds = draw(st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=1, max_size=5))
    least = draw(st.lists(st.sampled_from([0.0, 0.3, 0.6, 1.1]), min_size=len(odds), max_size=len(odds)))
    return draw(st.sampled_from([None, Stop(odds, draw(st.sampled_from([0.0, 0.5])), least)]))


@given(
    token_ids=st.lists(st.sampled_from([7, 8, 9, BROKEN, UNCHOSEN]), min_size=1, max_size=6),
    margins=st.lists(st.sampled_from([0.1, 2.0, MOST_MARGIN, 9.0, nan]), min_size=6, max_size=6),
    depth=st.integers(0, 6),
    stop=stops(),
)
def test_drafts_count_up_to_a_stop_or_one_that_is_none(
    token_ids: list[int], margins: list[float], depth: int, stop: Stop | None
) -> None:
    margins, depth = margins[: len(token_ids)], min(depth, len(token_ids))
    if stop is not None:  # a rule is at least as deep as the plan
        more = len(token_ids) - len(stop.odds)
        stop = replace(stop, odds=stop.odds + [0.0] * more, least=stop.least + [0.0] * more)
    rows, asked = rows_with([[1], [1]]), LateDraft(1, depth, 1, 1, stop)
    there, stops = orders_of([asked], DraftShape(1, 1, len(token_ids)), padding=2)
    orders = DraftOrders(*torch.from_numpy(there), torch.from_numpy(stops))
    found = torch.tensor([token_ids]), torch.tensor([margins], dtype=torch.float64)
    keep_drafts(rows.on_device, orders, *found)
    count = oracle.num_drafts(token_ids, margins, depth, stop)
    assert drafts_of(rows.on_device, 1) == token_ids[:count]
    alive = rows.on_device.alive[1, : len(token_ids)]
    assert (alive.diff() <= 0).all()


def test_a_step_gathers_the_drafts_of_its_budget() -> None:
    """The step has three rows with 3, 2 and no drafts, and a chunk of a prompt."""
    rows = rows_with([[1, 2, 3], [4, 5], [6], [7, 8, 9]])
    state = rows.on_device
    state.computed[:4] = torch.tensor([2, 1, 0, 0])
    state.drafts[:2, :3] = torch.tensor([[11, 12, 13], [21, 22, 23]])
    state.num_drafts[:3] = torch.tensor([3, 2, 0])
    state.alive[:2, :3] = torch.tensor([[0.9, 0.5, 0.2], [0.6, 0.3, 0.1]])
    known, most, samples = torch.tensor([1, 1, 1, 2]), torch.tensor([3, 3, 3, 0]), torch.tensor([1, 1, 1, 0])
    step = StepRows(torch.arange(4), known, most, samples)
    whole = gather(state, step, 10, 8, scratch_slot=64, width=1)
    assert whole.tokens.token_ids.tolist() == [3, 11, 12, 13, 5, 21, 22, 6, 7, 8]
    assert cut_to_budget(state, step, torch.tensor([3])).tolist() == whole.num_drafts.tolist() == [3, 2, 0, 0]
    some = gather(state, step, 8, 6, scratch_slot=64, width=1)
    assert some.tokens.token_ids.tolist() == [3, 11, 12, 5, 21, 6, 7, 8]
    assert some.num_drafts.tolist() == [2, 1, 0, 0]
    assert some.tokens.wanted.tolist() == [0, 1, 2, 3, 4, 5]
    assert some.first_place[:3].tolist() == [0, 3, 5]


def test_graphs_of_drafting_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes used last stay; one that was dropped is captured again."""
    captured: list[int] = []

    def capture(function: Any, inputs: Any) -> Any:
        captured.append(function.args[0].deepest)
        return Uncaptured(function, inputs)

    monkeypatch.setattr(late_counts, "MAX_GRAPHS", 3)
    rows, ran = rows_with([[1], [1]]), []
    rows.capture = capture  # type: ignore[assignment]
    graphs = late_counts.DraftGraphs(rows, lambda shape, orders: ran.append(shape.deepest))
    asked = [1, 2, 3, 1, 4, 1, 2, 4]
    for deepest in asked:
        graphs.run(DraftShape(1, 1, deepest), [LateDraft(1, deepest, 1, 1, None)], captured=True)
    assert ran == asked
    assert captured == [1, 2, 3, 4, 2]


def test_a_budget_needs_no_number_from_the_device() -> None:
    with FakeTensorMode() as mode:
        given_ = torch.rand(3, 4, dtype=torch.float64), torch.ones(3, dtype=torch.int64), torch.tensor([5])
        assert allot(*map(mode.from_tensor, given_)).shape == (3,)


# Through the late loop -----------------------------------------------------------------------------


REQUESTS = [
    Request(str(i), tuple(range(40 + i, 60)), SamplingParams(temperature=(0.0, 0.8)[i % 2], max_tokens=40), seed=i)
    for i in range(6)
]


class Budgeted(RestlessK):
    """Eight drafts of every row, of which a step verifies five."""

    BUDGET = 5

    def plan(self, view: StepView) -> Plan:
        return Plan({row: RowPlan(self._drafter, 8) for row in view.rows.tolist()}, budget=self.BUDGET)

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        return draft


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("draft", ["draft-model:model=noisy", "ngram:min=1"])
def test_passes_are_as_long_as_their_budget_and_texts_stay(draft: str, captured: bool) -> None:
    """Also where steps and drafting are padded and run as captured."""
    plain = plain_answers(REQUESTS, "cuda")
    engine = make_engine(f"{draft},k=8", PLAIN, types="cuda")
    engine.controller = Budgeted(draft.partition(":")[0], 8, 0)
    target: LateTarget = engine.target  # type: ignore[assignment]
    if captured:
        target.rows.capture = Uncaptured
        target.graphs = StepGraphs(target, Uncaptured)
    run_step, lengths = target.graphs.run, []

    def watched(block: NDArray[int64], num_tokens: int, *others: int) -> StepOutputs:
        lengths.append((num_tokens, int(block[1].sum())))
        return run_step(block, num_tokens, *others)

    target.graphs.run = watched  # type: ignore[assignment]
    assert_same(plain, run(engine, REQUESTS))
    counts = engine.stats().drafters[draft.partition(":")[0]]
    assert engine.stats().drafter_failures == 0
    assert counts.verified_at[0] > 50
    assert counts.drafted > 1.5 * sum(counts.verified_at), "what was made and not verified is counted"
    assert all(num_tokens <= num_known + Budgeted.BUDGET for num_tokens, num_known in lengths)


@pytest.mark.parametrize(("law", "budget"), [("coupled", Budgeted.BUDGET), ("rejection", None)])
def test_only_laws_that_admit_any_trim_have_budgets(law: str, budget: int | None) -> None:
    engine = make_engine("ngram:min=1,k=8", PLAIN, law, types="cuda")
    engine.controller = Budgeted("ngram", 8, 0)
    request, budgets = engine.target.request, set()

    def watched(batch: Batch, draft: Draft) -> ReadyPass:
        budgets.add(draft.budget)
        return request(batch, draft)

    engine.target.request = watched  # type: ignore[method-assign]
    run(engine, REQUESTS[:2])
    assert budgets == {budget}


def test_the_controller_sets_budgets_for_drafters_of_the_device() -> None:
    """Steps with drafts have one; texts stay, and no step verifies more."""
    plain = plain_answers(REQUESTS, "cuda")
    engine = make_engine("auto:suffix+draft-model:model=same", PLAIN, types="cuda")
    plan, budgets = engine.controller.plan, []

    def watched(view: StepView) -> Plan:
        found = plan(view)
        if any(row.k for row in found.rows.values()):
            budgets.append(found.budget)
        return found

    engine.controller.plan = watched  # type: ignore[method-assign]
    assert_same(plain, run(engine, REQUESTS))
    assert budgets
    assert all(budgets), budgets
