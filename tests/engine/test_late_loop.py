"""The late loop: promise 1 on a device whose outcomes come a step late, and what it costs the host."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.backend.cuda import late_target
from paceline.backend.cuda.graphs import Uncaptured
from paceline.backend.cuda.record import Record
from paceline.core.errors import PacelineError
from paceline.core.params import SamplingParams, Speculation
from paceline.core.request_nouns import Request
from paceline.draft import late
from paceline.engine.late_loop import LateLoop
from paceline.engine.step import SerialLoop
from tests.draft.heads import CORRECTED, WHOLE, drafter_of, trained_head
from tests.engine.same_text import PLAIN, Settings, assert_same, make_engine, plain_answers, run, target
from tests.engine.test_same_text import assert_all_met, assert_some_met, suite

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from tests.engine.same_text import Tally

CUDA = "cuda"
FEW = 4  # workloads of a round here; the nightly run has more
NGRAM, OWN_MODEL = "ngram:min=1,max=4", "draft-model:model=noisy"


def requests(count: int = 6, max_tokens: int = 24, **params: Any) -> list[Request]:
    random = Random(3)
    prompts = [tuple(random.randrange(40, 200) for _ in range(9 + 5 * i)) for i in range(count)]
    return [
        Request(str(i), p, SamplingParams(max_tokens=max_tokens, temperature=i % 2 * 0.8, **params), seed=i)
        for i, p in enumerate(prompts)
    ]


def assert_met(tally: Tally) -> None:
    """Both endings, a preemption and a prefix hit: the nightly run asks for more."""
    assert tally.endings == {"stop", "length"}
    assert tally.preemptions
    assert tally.cached_tokens


def assert_accepted(tally: Tally) -> None:
    """The above without a preemption, which few workloads meet; and drafts that are kept."""
    assert tally.endings == {"stop", "length"}
    assert tally.cached_tokens
    assert sum(tally.accepted_at) > 10


@pytest.mark.parametrize("draft", ["off", NGRAM, OWN_MODEL])
def test_same_text_one_step_late(draft: str) -> None:
    suite(draft, FEW, assert_met, CUDA)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", CORRECTED])
def test_same_text_one_step_late_with_heads_on_the_device(kind: str) -> None:
    head = trained_head(kind, target().decoder)  # type: ignore[arg-type]
    tally = suite(f"{drafter_of(kind)}:model={head}", FEW // 2, assert_accepted, CUDA)
    assert tally.stats.drafter_failures == tally.stats.untapped_tokens == 0


def test_same_text_one_step_late_with_the_controller() -> None:
    tally = suite(f"auto:suffix:shared=2000+{OWN_MODEL}", FEW, assert_accepted, CUDA)
    assert tally.stats.drafter_failures == 0


NIGHTLY = [
    "off",
    NGRAM,
    "suffix:shared=2000",
    OWN_MODEL,
    "draft-model:layers=2",
    "draft-model:model=renumbered",
    "draft-model:model=other,vocabulary=strings",
    f"auto:suffix:shared=2000+{OWN_MODEL}",
]


@pytest.mark.nightly
@pytest.mark.parametrize("draft", NIGHTLY)
def test_same_text_one_step_late_over_many_workloads(draft: str) -> None:
    suite(draft, 40, assert_all_met, CUDA)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "block", CORRECTED, WHOLE])
def test_same_text_one_step_late_with_heads_over_many_workloads(kind: str) -> None:
    head = trained_head(kind, target().decoder)  # type: ignore[arg-type]
    suite(f"{drafter_of(kind)}:model={head}", 20, assert_some_met, CUDA)


@pytest.mark.parametrize("draft", ["off", f"{OWN_MODEL},k=3", f"{NGRAM},k=3"])
def test_the_texts_are_those_of_the_reference(draft: str) -> None:
    """The reference is another backend with the same float64 weights."""
    asked = requests()
    assert_same(plain_answers(asked), run(make_engine(draft, PLAIN, types=CUDA), asked))


@pytest.mark.parametrize("law", ["rejection", "block"])
@pytest.mark.parametrize("draft", ["off", f"{NGRAM},k=3"])
def test_greedy_texts_are_those_of_the_reference_under_laws_of_the_host(draft: str, law: str) -> None:
    """Alone, and beside rows whose tokens the host draws."""
    asked = requests()
    greedy = [r for r in asked if r.params.temperature == 0]
    expected = plain_answers(asked)
    for some in (greedy, asked):
        got = run(make_engine(draft, PLAIN, law, CUDA), some)
        assert all(got[r.request_id] == expected[r.request_id] for r in greedy)


def test_a_device_that_captures_steps_and_drafting_tells_the_same() -> None:
    """Inputs in memory of their own, rows and tokens padded: as in graphs, which need a device."""
    asked = requests()
    engine = make_engine(f"{OWN_MODEL},k=3", PLAIN, types=CUDA)
    rows: Any = engine.target.rows
    graphs: Any = engine.target.graphs  # type: ignore[attr-defined]
    rows.capture = graphs._capture = Uncaptured
    assert_same(plain_answers(asked), run(engine, asked))
    assert graphs._made
    assert engine.stats().drafters["draft-model"].drafted > 50


def test_a_drafting_that_cannot_be_captured_runs_piece_by_piece_and_is_tried_once() -> None:
    asked, tried = requests(), []

    def refusing(function: Any, inputs: Any) -> Any:
        tried.append(function)
        raise RuntimeError("a graph cannot hold this")

    engine = make_engine(f"{OWN_MODEL},k=3", PLAIN, types=CUDA)
    rows: Any = engine.target.rows
    rows.capture = refusing
    for _ in range(4):  # rows whose drafting fails decode plainly; later ones draft
        assert_same(plain_answers(asked), run(engine, asked))
    assert engine.stats().drafter_failures
    assert len(tried) == len({partial.args for partial in tried}) > 1
    assert engine.stats().drafters["draft-model"].drafted > 50


@pytest.mark.parametrize("step", ["draft", "catch_up"])
def test_a_drafter_drafts_on_after_one_failure(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and device agree on what it has read, whichever call failed."""
    monkeypatch.setattr(late, "STEP_TOKENS", 24)  # rows fall behind
    asked = requests(2)
    engine = make_engine(f"{OWN_MODEL},k=3", PLAIN, types=CUDA)
    program: Any = engine.drafting.drafters["draft-model"].program  # type: ignore[attr-defined]
    right = getattr(program, step)

    def failing_once(_: Any) -> None:
        setattr(program, step, right)
        raise torch.OutOfMemoryError("no memory")

    setattr(program, step, failing_once)
    assert_same(plain_answers(asked), run(engine, asked))
    assert engine.stats().drafter_failures == 1
    assert engine.stats().drafters["draft-model"].drafted > 30


@pytest.mark.parametrize("loop", [SerialLoop, LateLoop])
def test_both_loops_run_on_a_late_target(loop: Any) -> None:
    asked = requests()
    engine = make_engine(f"{OWN_MODEL},k=3", PLAIN, types=CUDA)
    engine.loop = loop()
    assert_same(plain_answers(asked), run(engine, asked))


def test_what_the_device_takes_to_draft_is_the_drafters_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of a late drafter only enqueues its work, and costs next to nothing."""
    drafting_s = 10.0

    def timed(*_: Any) -> Record:
        record = Record()
        record.draft_s = drafting_s
        return record

    monkeypatch.setattr(late_target, "begin_record", timed)
    engine = make_engine(f"{OWN_MODEL},k=3", PLAIN, types=CUDA)
    run(engine, requests(2))
    stats = engine.stats()
    assert stats.draft_s // drafting_s == stats.steps


# Rows that wait for the host, and those that do not --------------------------------------------------


def steps_of(engine: Engine, request_ids: set[str], steps: int) -> list[set[str]]:
    """Return which of the requests each step launched."""
    found = []
    for _ in range(steps):
        engine.step()
        found.append({r.request.request_id for r in engine.scheduler.running if r.in_flight} & request_ids)
    return found


def test_a_row_whose_tokens_the_host_chooses_runs_every_other_step_and_no_other_waits() -> None:
    plain, penalised = requests(2, 40, ignore_eos=True)
    penalised = Request(
        "p", penalised.prompt_ids, SamplingParams(max_tokens=40, presence_penalty=1.0, ignore_eos=True), seed=1
    )
    engine = make_engine("off", PLAIN, types=CUDA)
    for request in (plain, penalised):
        engine.add(request)
    engine.step()
    launched = steps_of(engine, {"0", "p"}, 12)
    assert all("0" in step for step in launched)
    turns = ["p" in step for step in launched]
    assert all(one != other for one, other in pairwise(turns))
    assert engine.stats().waited_rows >= 5


def test_all_rows_that_wait_take_a_step_each_time() -> None:
    """A lone row that waits costs no empty steps: its outcome is taken in first."""
    engine = make_engine("off", PLAIN, types=CUDA)
    params = SamplingParams(max_tokens=10, logprobs=2, ignore_eos=True)
    engine.add(Request("a", (40, 41, 42), params, seed=1))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps <= 12


def test_a_row_that_asks_for_no_drafts_does_not_wait_for_drafters_on_the_host() -> None:
    engine = make_engine("suffix:shared=2000,k=3", PLAIN, types=CUDA)  # shared trees are the host's
    off = Request("off", (40, 41, 42), SamplingParams(max_tokens=20, ignore_eos=True), seed=1)
    engine.add(Request("off", off.prompt_ids, off.params, seed=1, speculation=Speculation("off")))
    engine.step()
    assert all(step == {"off"} for step in steps_of(engine, {"off"}, 8))


# Ends and faults -------------------------------------------------------------------------------------


def test_a_cancelled_row_is_given_up_once_its_passes_are_known() -> None:
    engine = make_engine(f"{OWN_MODEL},k=3", PLAIN, types=CUDA)
    for request in requests(3, 60):
        engine.add(request)
    for _ in range(4):
        engine.step()
    engine.cancel("1")
    reasons = {}
    while engine.has_work:
        for outcome in engine.step():
            if outcome.finish_reason:
                reasons[outcome.request_id] = outcome.finish_reason
        engine.check()
    assert reasons["1"] == "cancelled"
    assert set(reasons) == {"0", "1", "2"}
    assert engine.scheduler.pool.num_held == 0


def test_the_device_and_the_host_agree_once_all_outcomes_are_known() -> None:
    engine = make_engine(f"{OWN_MODEL},k=3", Settings(num_rows=4), types=CUDA)
    for request in requests(4, 30, ignore_eos=True):
        engine.add(request)
    for _ in range(9):
        engine.step()
    assert engine.loop.wait()
    rows: Any = engine.target.rows
    device = rows.on_device
    for r in engine.scheduler.running:
        known = rows.known_len(r.row)
        assert device.length[r.row] >= known
        assert torch.equal(device.token_ids[r.row, :known], torch.from_numpy(rows.tokens(r.row)))


def test_a_row_without_a_number_ends_alone() -> None:
    """Broken logits end their row; the others' texts are those without it."""
    asked = requests(4, 30, ignore_eos=True)
    expected = plain_answers(asked, CUDA)
    engine = make_engine("off", PLAIN, types=CUDA)
    decoder: Any = engine.target.decoder
    logits = decoder.logits
    for request in asked:
        engine.add(request)
    engine.step()
    row = engine.scheduler.requests["2"].row
    spoilt_once: list[int] = []

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        rows = [r.row for r in engine.scheduler.running]
        if len(rows) == 4 and not spoilt_once:
            found[rows.index(row)] = torch.nan
            spoilt_once.append(row)
        return found

    decoder.logits = spoilt
    try:
        ends: dict[str, Any] = {}
        texts: dict[str, list[int]] = {r.request_id: [] for r in asked}
        while engine.has_work:
            for outcome in engine.step():
                texts[outcome.request_id] += outcome.token_ids
                ends[outcome.request_id] = outcome.finish_reason
    finally:
        del decoder.logits
    assert ends["2"] == "error"
    for name in ("0", "1", "3"):
        assert texts[name] == expected[name].token_ids[-len(texts[name]) :]


def test_a_drafter_without_a_number_drafts_nothing_and_disturbs_nothing() -> None:
    asked = requests(4, 30)
    engine = make_engine(f"{OWN_MODEL},k=3", PLAIN, types=CUDA)
    program: Any = engine.drafting.drafters["draft-model"].program  # type: ignore[attr-defined]
    logits = program._runner.logits
    program._runner.logits = lambda states: torch.full_like(logits(states), torch.nan)
    assert_same(plain_answers(asked), run(engine, asked))
    assert not engine.stats().drafters


def test_an_unloaded_drafter_takes_no_more_of_the_device_and_texts_go_on() -> None:
    asked = requests(3, 30)
    expected = plain_answers(asked)
    head = trained_head("eagle3", target().decoder)  # type: ignore[arg-type]
    engine = make_engine(f"eagle3:model={head},k=3", PLAIN, types=CUDA)
    rows: Any = engine.target.rows
    assert len(rows.tap_sinks) == 1
    engine.unload("eagle3")
    assert not rows.tap_sinks
    assert_same(expected, run(engine, asked))


def test_a_target_that_fails_ends_the_step_with_its_error() -> None:
    engine = make_engine("off", PLAIN, types=CUDA)
    decoder: Any = engine.target.decoder

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device is gone")

    decoder.forward = failing
    try:
        engine.add(requests(1)[0])
        with pytest.raises((RuntimeError, PacelineError), match="the device is gone"):
            for _ in range(3):
                engine.step()
    finally:
        del decoder.forward
