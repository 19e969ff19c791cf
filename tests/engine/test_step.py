"""The serial loop takes the six verbs in their order, and times a pass without the work beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from paceline.core.nouns import Batch, BatchRow, Plan, RowDraft, RowPlan
from paceline.draft.drafter import Needs
from paceline.draft.lookup.lookup import LookupDrafter
from paceline.draft.lookup.suffix import SuffixConfig
from paceline.engine import step
from paceline.engine.drafter_pool import DrafterPool
from paceline.engine.step import PendingStep, SerialLoop
from tests.engine.same_text import PLAIN, Request, make_engine
from tests.engine.test_output_queue import asked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VERBS = ["plan", "admit", "propose", "score", "judge", "commit"]


class Spy:
    """Notes which verbs are called in which order, `mask`, `flush` and the wait for the pass among them."""

    def __init__(self, inner: Any, seen: list[str]) -> None:
        self._inner, self._seen = inner, seen

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._noted(name, found) if callable(found) else found

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            self._seen.append(name)
            made = call(*arguments)
            return Spy(made, self._seen) if isinstance(made, PendingStep) else made

        return noted


def test_a_step_is_six_verbs_and_outcomes_are_made_between_launch_and_wait() -> None:
    engine, seen = make_engine("ngram:k=2", PLAIN), list[str]()
    engine.add(asked("a", 9))
    SerialLoop().step(Spy(engine, seen))
    assert [name for name in seen if name in VERBS] == VERBS
    assert seen == ["plan", "admit", "propose", "score", "mask", "flush", "wait", "judge", "commit"]


def test_a_step_without_rows_ends_after_admit_and_is_not_counted() -> None:
    engine, seen = make_engine("off", PLAIN), list[str]()
    SerialLoop().step(Spy(engine, seen))
    assert seen == ["plan", "admit"]
    assert engine.step() == []
    assert (engine.stats().steps, engine.stats().step_s) == (0, 0.0)


class Pass:
    def wait(self) -> Batch:
        return Batch(0, ())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_work_beside_a_pass_is_its_time_only_if_the_pass_goes_on(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([2.0, 5.0, 9.0])  # launched, waited for, over
    monkeypatch.setattr(step, "perf_counter", lambda: next(clock))
    scored = PendingStep(Pass(), 1.0, asynchronous=asynchronous).wait()  # type: ignore[arg-type]
    assert scored.target_s == (8.0 if asynchronous else 5.0)
    assert scored.overlapped_s == (3.0 if asynchronous else 0.0)


def test_times_of_a_step_add_up() -> None:
    engine = make_engine("ngram:k=4,min=1", PLAIN)
    engine.add(Request("a", (5, 9, 13, 7) * 6, asked("a", 60).params, seed=1))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.steps > 5
    assert stats.draft_s + stats.target_s < stats.step_s
    assert 0 < stats.host_s < stats.step_s


class Counting(LookupDrafter):
    """Proposes the number of the call."""

    name = "suffix"
    calls = 0

    def preview(self, max_drafts: Mapping[int, int]) -> dict[int, RowDraft]:
        self.calls += 1
        return {row: RowDraft([self.calls] * k, self.name) for row, k in max_drafts.items()}


def test_a_preview_is_of_its_own_step() -> None:
    """Where a later step has none, the drafter is asked for the text of that one."""
    drafter = Counting(SuffixConfig(), Needs(instant=True), None)  # type: ignore[arg-type]
    pool, batch = DrafterPool([drafter], 300), Batch(1, (BatchRow(0, "r", 1, 2, samples=True, max_len=9),))
    found = []
    for previews in (True, True, False):
        pool.unavailable()  # begins a plan
        if previews:
            pool.preview([0], [2])
        plan = Plan({0: RowPlan("suffix", 1)}) if len(found) != 1 else Plan()  # the second step takes none
        found.append(list(pool.propose(batch, plan).rows[0].token_ids))
    assert found == [[1], [], [3]]
