"""A drafter that fails costs speculation, never a request; one request's end disturbs no other."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import nan
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest

from paceline.core.errors import PromptTooLong, RequestError
from paceline.core.nouns import BROKEN, UNCHOSEN, Batch, Draft, Plan, RowDraft, Scores
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from tests.engine.same_text import PLAIN, Settings, assert_same, make_engine, plain_answers, run

if TYPE_CHECKING:
    from paceline.backend.target import ReadyPass
    from paceline.engine.engine import Engine

REQUESTS = [
    Request(str(i), tuple(range(40, 50 + i)) * 2, SamplingParams(temperature=t, max_tokens=30), seed=i)
    for i, t in enumerate([0.0, 0.7, 1.0, 1.5])
]


def broken(engine: Engine, row: RowDraft | Exception) -> None:
    """Make the engine's drafter answer every row with nonsense, or raise."""
    (drafter,) = engine.drafting.drafters.values()

    def propose(batch: Batch, plan: Plan) -> Draft:
        if isinstance(row, Exception):
            raise row
        return Draft(tuple(row for _ in batch.rows))

    drafter.propose = propose  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "nonsense",
    [
        RuntimeError("the drafter is out of order"),
        RowDraft([1, 2], "ngram", confidence=[0.5, nan]),
        RowDraft([10_000], "ngram"),
        RowDraft([-1], "ngram"),
        RowDraft([1] * 9, "ngram"),
        RowDraft([1], "ngram", probs=np.full((1, 320), nan)),
        RowDraft([1.5], "ngram"),  # type: ignore[list-item]
        RowDraft([1, 2], "ngram", probs=np.full((1, 320), 1 / 320)),
        RowDraft([1], "ngram", probs=np.full((1, 100), 0.01)),
    ],
)
def test_a_broken_drafter_costs_speculation_only(
    nonsense: RowDraft | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine("ngram:k=4", PLAIN)
    broken(engine, nonsense)
    with caplog.at_level(logging.WARNING):
        assert_same(plain_answers(REQUESTS), run(engine, REQUESTS))
    assert engine.stats().drafter_failures > 1
    assert len([r for r in caplog.records if "ngram failed" in r.message]) == 1, "logged once"


def spoil(engine: Engine, request_id: str, least: int = 0) -> None:
    """Leave the target without a number for a request's tokens from an index of its text on.

    That is in the backend's own choices and in its logits alike.
    """
    request = engine.target.request

    def noted(batch: Batch, draft: Draft) -> ReadyPass:
        asked = request(batch, draft)

        def launched(thread: Any = None) -> Any:
            pending = asked.launch(thread)
            return SimpleNamespace(wait=lambda: spoilt(batch, pending.wait()), pass_s=0.0, draft_s=0.0)

        return SimpleNamespace(launch=launched, masks=None)  # type: ignore[return-value]

    def spoilt(batch: Batch, scores: Scores) -> Scores:
        for index in [i for i, r in enumerate(batch.rows) if r.request_id == request_id]:
            for at in range(scores.cu_len[index], scores.cu_len[index + 1]):
                if scores.specs[at].position < least:
                    continue
                if scores.chosen[at] != UNCHOSEN:
                    scores.chosen[at] = BROKEN
                else:
                    scores.logits[scores.logit_idx[at]] = nan
        return scores

    engine.target.request = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("answer", [None, 5, Draft((RowDraft([1], "ngram"),) * 9), Draft(())])
def test_an_answer_that_is_no_draft_of_these_rows_costs_speculation_only(answer: Any) -> None:
    engine = make_engine("ngram:k=4", PLAIN)
    (drafter,) = engine.drafting.drafters.values()
    drafter.propose = lambda batch, plan: answer  # type: ignore[method-assign]
    assert_same(plain_answers(REQUESTS), run(engine, REQUESTS))


def test_a_drafter_that_cannot_say_what_it_holds_costs_speculation_only() -> None:
    engine = make_engine("draft-model:model=noisy,k=4", Settings(prefix_cache=True))
    (drafter,) = engine.drafting.drafters.values()

    def lost(row: int) -> NoReturn:
        raise KeyError(row)

    drafter.valid_lens = lost  # type: ignore[method-assign]
    assert_same(plain_answers(REQUESTS), run(engine, REQUESTS))
    assert engine.stats().drafter_failures > 1
    assert not any(any(engine.scheduler.pool._valid[store]) for store in drafter.needs.stores)


@pytest.mark.parametrize("law", ["coupled", "rejection", "block"])
def test_a_target_without_numbers_ends_that_row_only(law: str) -> None:
    engine = make_engine("ngram:k=4", PLAIN, law=law)
    spoil(engine, "2")
    answers = run(engine, REQUESTS)
    assert answers["2"].ending[0] == "error"
    assert answers["2"].token_ids == []
    expected = run(make_engine("ngram:k=4", PLAIN, law=law), REQUESTS)
    assert_same({k: v for k, v in expected.items() if k != "2"}, {k: v for k, v in answers.items() if k != "2"})
    assert engine.scheduler.pool.num_held == 0


@pytest.mark.parametrize("law", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "logprobs": 2}])
def test_drafts_kept_before_the_target_has_no_number_are_written(law: str, changes: dict[str, Any]) -> None:
    """As plain decoding writes them; a stop among them ends the answer before that."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "ignore_eos": True} | changes)
    request = Request("a", (5, 9, 13, 7) * 4, params, seed=1)
    prompt_len = len(request.prompt_ids)
    text = plain_answers([request])["a"].token_ids
    stopped = replace(request, params=replace(params, stop_token_ids=(text[3],)))
    plain_text = law == "coupled" or params.greedy  # else it depends on the drafts, but not for how long it is
    for asked, least in [(request, 4), (request, 5), (request, 8), (stopped, 4), (stopped, 5), (stopped, 6)]:
        plain, drafted = make_engine("off", PLAIN), make_engine("draft-model:model=same,k=4", PLAIN, law)
        for engine in (plain, drafted):
            spoil(engine, "a", prompt_len + least)
        expected, got = run(plain, [asked]), run(drafted, [asked])
        if plain_text:
            assert_same(expected, got)
        elif asked is request:
            assert got["a"].ending[0] == "error"
            assert len(got["a"].token_ids) == least
        assert drafted.stats().drafter_failures == 0


@pytest.mark.parametrize("when", [0, 1, 3, 8])
def test_cancelling_at_any_moment_disturbs_no_other(when: int) -> None:
    expected = plain_answers(REQUESTS)
    engine = make_engine("draft-model:model=noisy,k=4", Settings(num_rows=3, prefill_tokens=5))
    texts = {r.request_id: "" for r in REQUESTS}
    endings: dict[str, str | None] = {}
    for request in REQUESTS:
        engine.add(request)
    steps = 0
    while engine.has_work:
        if steps == when:
            engine.cancel("1")
            engine.cancel("1")
            engine.cancel("unknown")
        for outcome in engine.step():
            texts[outcome.request_id] += outcome.text
            endings[outcome.request_id] = outcome.finish_reason
        engine.check()
        steps += 1
    assert endings["1"] == "cancelled"
    assert expected["1"].text.startswith(texts["1"].rstrip("\ufffd"))
    assert all(texts[name] == expected[name].text for name in "023")
    assert engine.scheduler.pool.num_held == 0


def test_bad_requests_are_refused_and_change_nothing() -> None:
    engine = make_engine("off", PLAIN)
    params = SamplingParams(max_tokens=4)
    for bad, error in [
        (Request("a", (5, 320), params, seed=0), RequestError),
        (Request("a", (-1,), params, seed=0), RequestError),
        (Request("a", (1,) * 300, params, seed=0), PromptTooLong),
    ]:
        with pytest.raises(error):
            engine.add(bad)
        assert not engine.has_work
    engine.add(Request("a", (1,), params, seed=0))
    with pytest.raises(RequestError, match="in use"):
        engine.add(Request("a", (1,), params, seed=0))


@pytest.mark.parametrize(("param", "ids"), [("logit_bias", {320: 1.0}), ("stop_token_ids", (7, 320))])
def test_tokens_outside_the_vocabulary_are_refused_wherever_they_are_named(param: str, ids: Any) -> None:
    engine = make_engine("off", PLAIN)
    params = SamplingParams(max_tokens=8, min_tokens=5, **{param: ids})
    with pytest.raises(RequestError, match=f"{param} names tokens outside the vocabulary of 320") as refused:
        engine.add(Request("a", (1,), params, seed=0))
    assert refused.value.param == param
    assert not engine.has_work


@pytest.mark.parametrize("law", ["rejection", "block"])
@pytest.mark.parametrize("draft", ["ngram:k=4,min=1", "draft-model:model=noisy,k=4", "draft-model:model=same,k=4"])
def test_the_other_laws_run_every_drafter_and_agree_when_greedy(law: str, draft: str) -> None:
    engine = make_engine(draft, PLAIN, law)
    expected, got = plain_answers(REQUESTS), run(engine, REQUESTS)
    assert got["0"].token_ids == expected["0"].token_ids
    assert engine.stats().drafter_failures == 0
    if "same" in draft:
        counts = engine.stats().drafters["draft-model"]
        assert counts.accepted >= 0.99 * counts.verified


def test_one_request_that_cannot_be_written_disturbs_no_other() -> None:
    expected = plain_answers(REQUESTS)
    engine = make_engine("ngram:k=4", PLAIN)
    answers = dict.fromkeys(expected, "")
    for request in REQUESTS:
        engine.add(request)
    doomed = engine.outputs.responses["2"]
    errors, written = {}, dict.fromkeys(expected, 0)
    while engine.has_work:
        if doomed.decode_passes > 5:
            doomed.checker._detokenizer._pieces = {}
        for outcome in engine.step():
            answers[outcome.request_id] += outcome.text
            written[outcome.request_id] += len(outcome.token_ids)
            if outcome.figures:
                assert outcome.figures.completion_tokens == written[outcome.request_id]
            errors[outcome.request_id] = outcome.error
        engine.check()
    assert errors["2"] is not None
    assert engine.scheduler.pool.num_held == 0
    assert all(answers[name] == expected[name].text for name in "013")


def test_page_hashes_begin_with_what_the_kv_depends_on() -> None:
    fingerprint = make_engine("off", PLAIN).scheduler.fingerprint
    assert fingerprint.split("\0") == ["tiny", "reference", "f64", "f64"]
