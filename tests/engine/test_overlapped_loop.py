"""Two groups that alternate: the same answers as serially and plainly, and pages that add up."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from paceline.backend.pass_thread import PassThread
from paceline.control.fixed import FixedK
from paceline.control.policy import StepView
from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams
from paceline.engine.overlapped_loop import OverlappedLoop
from tests.draft.heads import CORRECTED, drafter_of, trained_head
from tests.engine.same_text import (
    PLAIN,
    Answer,
    Request,
    RestlessK,
    Settings,
    Tally,
    assert_same,
    make_engine,
    plain_answers,
    run,
    settings_,
    target,
    workloads,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.reference.decoder import ReferenceDecoder
    from paceline.control.policy import StepView
    from paceline.core.nouns import Batch, Draft, Plan
    from paceline.draft.drafter import Drafter
    from paceline.engine.engine import Engine

WORKER = PassThread("target")  # engines of one process may share it: each waits for its own passes
EXAMPLES = 12
FAILURES = 0.1  # of the times a drafter is asked


def overlapped(draft: str, changed: Settings, types: str = "f64", law: str = "coupled") -> Engine:
    engine = make_engine(draft, changed, law, types)
    engine.loop = OverlappedLoop(WORKER, lambda _: True)
    return engine


def unreliable(drafter: Drafter, random: Random) -> None:
    """Make a drafter fail now and then, before it has done anything or after."""
    propose = drafter.propose

    def failing(batch: Batch, plan: Plan) -> Draft:
        if random.random() < FAILURES / 2:
            raise RuntimeError("not now")
        found = propose(batch, plan)
        if random.random() < FAILURES / 2:
            raise RuntimeError("too late")
        return found

    drafter.propose = failing  # type: ignore[method-assign]


def serve(engine: Engine, requests: list[Request], random: Random) -> tuple[dict[str, Answer], set[str]]:
    """Let requests arrive and be cancelled at any moment; return their answers and which were cancelled."""
    answers = {r.request_id: Answer() for r in requests}
    waiting, cancelled = list(requests), set[str]()
    while waiting or engine.has_work:
        while waiting and random.random() < 0.5:
            engine.add(waiting.pop(0))
        if random.random() < 0.05:
            name = random.choice(requests).request_id
            if name in engine.scheduler.requests and not engine.scheduler.requests[name].ended:
                engine.cancel(name)
                cancelled.add(name)
        for outcome in engine.step():
            answers[outcome.request_id].take(outcome)
        engine.check()
    assert engine.scheduler.pool.num_held == 0
    return answers, cancelled


def test_an_id_is_in_use_until_its_last_pass_is_over() -> None:
    engine = overlapped("draft-model:model=noisy,k=3", PLAIN)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    asked = {name: Request(name, tuple(range(40, 60)), params, seed=1) for name in "abcd"}
    expected = run(make_engine("off", PLAIN), list(asked.values()))
    answers = {name: Answer() for name in asked}
    for request in asked.values():
        engine.add(request)
    cancelled = again = ""
    for step in range(400):
        if step == 6:
            cancelled = next(r.request.request_id for r in engine.scheduler.running if r.in_flight)
            engine.cancel(cancelled)
            with pytest.raises(RequestError, match="in use"):
                engine.add(asked[cancelled])
        elif cancelled and not again and cancelled not in engine.scheduler.requests:
            again, answers[cancelled] = cancelled, Answer()
            engine.add(asked[again])
        for outcome in engine.step():
            answers[outcome.request_id].take(outcome)
        engine.check()
    assert again
    assert not engine.has_work
    assert_same(expected, answers)


def compare(draft: str, types: str, tally: Tally, examples: int = EXAMPLES) -> int:
    """Compare answers with those of plain decoding; return how many steps were overlapped."""
    num_overlapped = 0

    @seed(1)
    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(workloads(), settings_(), st.sampled_from([1, 4, 8]), st.booleans(), st.integers(0, 1000))
    def check(requests: list[Request], changed: Settings, k: int, restless: bool, number: int) -> None:
        nonlocal num_overlapped
        expected = plain_answers(requests, types)
        engine, random = overlapped(draft if draft == "off" else f"{draft},k={k}", changed, types), Random(number)
        for drafter in engine.drafting.drafters.values():
            unreliable(drafter, random)
        if restless and draft != "off":
            engine.controller = RestlessK(draft.partition(":")[0], 8, number)
        got, cancelled = serve(engine, requests, random)
        for name in cancelled:
            begun, whole = got.pop(name), expected.pop(name)
            assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
            assert begun.ending[0] == "cancelled"
        assert_same(expected, got)
        tally.add(engine, got)
        num_overlapped += engine.stats().overlapped_steps

    check()
    return num_overlapped


DRAFTS = [
    ("ngram:min=1,max=4", "f64"),
    ("suffix:shared=2000", "int8"),
    ("draft-model:model=noisy", "f64"),
    ("draft-model:model=noisy", "int4"),
    ("draft-model:layers=2", "f64"),
    ("draft-model:layers=2", "int8"),
    ("draft-model:model=other,vocabulary=strings", "int8"),
    ("off", "int8"),
]


@pytest.mark.parametrize(("draft", "types"), DRAFTS)
def test_two_groups_that_alternate_write_the_same_text(draft: str, types: str) -> None:
    tally = Tally()
    assert compare(draft, types, tally) > 100
    assert tally.preemptions > 0
    assert draft == "off" or (sum(tally.accepted_at) > 0 and tally.stats.drafter_failures > 0)


@pytest.mark.parametrize(
    ("kind", "types"), [("eagle", "f64"), ("eagle3", "int8"), ("peagle", "int8"), (CORRECTED, "int8")]
)
def test_heads_read_what_was_tapped_for_their_own_rows(kind: str, types: str) -> None:
    decoder: ReferenceDecoder = target().decoder  # type: ignore[assignment]
    tally = Tally()
    assert compare(f"{drafter_of(kind)}:model={trained_head(kind, decoder)}", types, tally) > 100
    assert sum(tally.accepted_at) > 0
    assert tally.stats.untapped_tokens == 0


def test_the_controller_keeps_the_open_steps_of_two_groups_apart() -> None:
    tally = Tally()
    assert compare("auto:suffix+draft-model:model=noisy", "int8", tally) > 100
    assert sum(tally.accepted_at) > 0


REQUESTS = [Request(str(i), (40 + i, 50, 60), SamplingParams(max_tokens=24), seed=i) for i in range(5)]


def test_a_draft_model_loses_no_acceptance_by_overlap() -> None:
    """What a drafter remembers of a step outlives the other group's step."""
    engine = overlapped("draft-model:model=same,k=4", PLAIN)
    run(engine, REQUESTS)
    counts = engine.stats().drafters["draft-model"]
    assert counts.accepted == counts.verified > 0
    assert engine.stats().overlapped_steps > 5


def test_groups_are_evened_out_and_one_row_alone_is_served_serially() -> None:
    engine = overlapped("off", PLAIN)
    engine.add(REQUESTS[0])
    for _ in range(3):
        engine.step()
    assert engine.stats().overlapped_steps == 0
    for request in REQUESTS[1:]:
        engine.add(request)
    for _ in range(2):  # all are admitted, then there are two groups
        engine.step()
    groups = [r.group for r in engine.scheduler.running]
    assert {groups.count(0), groups.count(1)} == {2, 3}
    assert engine.stats().overlapped_steps == 1
    for name in "1234":
        engine.cancel(name)
    for _ in range(3):  # passes of cancelled rows are not taken back
        engine.step()
    before = engine.stats()
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.stats().since(before).overlapped_steps == 0
    assert engine.stats().since(before).steps > 5


def test_rows_go_over_to_the_group_that_has_less_work() -> None:
    engine = overlapped("off", PLAIN)
    for request in REQUESTS:
        engine.add(request)
    for _ in range(3):
        engine.step()
    alone = min((0, 1), key=[r.group for r in engine.scheduler.running].count)
    for running in [r for r in engine.scheduler.running if r.group == alone]:
        engine.cancel(running.request.request_id)
    for _ in range(3):
        engine.step()
        engine.check()
    groups = [r.group for r in engine.scheduler.running]
    assert {groups.count(0), groups.count(1)} == {1, 2}


def test_a_request_arriving_joins_the_group_that_is_drafted_for() -> None:
    engine = overlapped("off", PLAIN)
    for request in REQUESTS[:2]:
        engine.add(request)
    for _ in range(3):
        engine.step()
        engine.check()
    engine.add(REQUESTS[2])
    engine.step()
    engine.check()
    groups = {r.request.request_id: r.group for r in engine.scheduler.running}
    assert groups["0"] != groups["1"]
    assert all(r.in_flight == 1 for r in engine.scheduler.running)
    engine.step()
    assert engine.scheduler.requests["2"].decoding


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_other_laws_are_overlapped_too(law: str) -> None:
    engine = overlapped("draft-model:model=same,k=4", PLAIN, law=law)
    assert set(run(engine, REQUESTS)) == {r.request_id for r in REQUESTS}
    assert engine.stats().overlapped_steps > 5
    assert engine.stats().drafter_failures == 0


def test_a_pass_that_fails_is_the_step_s_error_and_leaves_no_thread_behind() -> None:
    engine = overlapped("off", PLAIN)
    for request in REQUESTS:
        engine.add(request)
    engine.step()

    class Broken:
        def launch(self, request: object) -> None:
            raise RuntimeError("no target")

    engine.target.decoder = Broken()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no target"):
        for _ in range(3):
            engine.step()
    assert PassThread("another").call(lambda: 1) == 1


def test_as_many_requests_run_at_once_as_serially_on_equal_pages() -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [Request(str(i), tuple(range(40, 70)), params, seed=i) for i in range(12)]
    most = []
    for engine in (
        make_engine("ngram:k=8,min=1", Settings(num_pages=24)),
        overlapped("ngram:k=8,min=1", Settings(num_pages=24)),
    ):
        for request in requests:
            engine.add(request)
        most.append(0)
        while engine.has_work:
            engine.step()
            engine.check()
            most[-1] = max(most[-1], len(engine.scheduler.running))
    assert most[1] >= most[0] > 4


class Paired:
    """A controller that is told of a group's round before it plans the group's next one."""

    def wants_preview(self, num_rows: int, unavailable: frozenset[int]) -> bool:
        return False

    def reuse_plan(self, num_rows: int) -> bool:
        return False

    def __init__(self) -> None:
        self.open: list[StepView] = []
        self._other: Paired | None = None

    @property
    def second_group(self) -> Paired:
        self._other = self._other or Paired()
        return self._other

    def admit(self, row: int, valid_lens: Mapping[str, int] | None = None, *, rebirth: bool = False) -> None:
        pass

    def forget_texts(self, drafter: str) -> None:
        pass

    def plan(self, view: StepView) -> Plan:
        assert not any(v.num_rows for v in self.open), "the last round's outcome is not known yet"
        self.open = [view]
        return FixedK("ngram", 4).plan(view)

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        return draft

    def observe(self, batch: Batch, *rest: object) -> tuple[()]:
        assert {r.row for r in batch.rows if r.decodes} <= set(self.open.pop().rows.tolist())
        return ()


def test_a_group_s_outcome_is_learnt_before_its_next_step_is_planned() -> None:
    engine = overlapped("ngram:k=4", PLAIN)
    engine.controller = Paired()
    run(engine, REQUESTS)
    assert engine.stats().overlapped_steps > 10
