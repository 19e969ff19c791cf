from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.measure import MeasuredAnswer, Run, acceptance_length, kept_per_position, record
from paceline.bench.prompt_file import Prompt
from paceline.bench.report import category_rows, summary
from paceline.control.online_cost import Predictions
from paceline.control.protocols import StepAccounting
from paceline.core.figures import Figures
from paceline.engine.stats import DraftCounts, Stats


def answer(start_s=0.0, times=(1.0, 2.0, 3.0), category="qa", tokens=None, **counts):
    figures = replace(Figures(5, len(times), 0, 2, 2, 0, 0, 0, seed=0), **counts)
    return MeasuredAnswer(Prompt(1, category, "x"), figures, start_s, tuple((t, 1) for t in times), tokens)


def run(answers, draft="off", concurrency=1, repeat=0, stats=None):
    return Run(draft, concurrency, repeat, tuple(answers), stats, 100.0)


def test_tpot_is_end_minus_first_over_the_gaps():
    assert answer(times=(1.0, 2.0, 5.0)).tpot_s == 2.0
    assert answer(times=(1.0,)).tpot_s is None


@pytest.mark.parametrize("concurrency", [2, None])
def test_a_rate_is_of_the_whole_run(concurrency):
    """Two in flight: 0-4 and 0-2, then 2-6. From 4 s on only one is left."""
    answers = [answer(0, (1, 2, 3, 4)), answer(0, (1, 2)), answer(2, (3, 4, 5, 6))]
    figures = record(run(answers, concurrency=concurrency))
    assert figures["wall_s"] == 6.0
    assert figures["output_tokens_per_s"] == 10 / 6


def test_acceptance_length_is_per_request_and_pass():
    two = [answer(decode_passes=10, decoded_tokens=30), answer(decode_passes=30, decoded_tokens=30)]
    assert acceptance_length(two) == 1.5
    assert acceptance_length([answer(decode_passes=0, decoded_tokens=0)]) is None


def arriving(*counts, tokens=(1, 2, 3)):
    """An answer of passes that brought so many tokens, after the prefill's one."""
    given = [(0.0, 1), *((1.0 + i, n) for i, n in enumerate(counts))]
    sums = {"decode_passes": len(counts), "decoded_tokens": sum(counts)}
    return replace(answer(tokens=tokens, **sums), arrivals=tuple(given))


def test_kept_per_position_adds_up_to_the_acceptance_length():
    answers = [arriving(1, 3, 5), arriving(2)]
    assert kept_per_position(answers) == [0.75, 0.5, 0.25, 0.25]
    assert 1 + sum(kept_per_position(answers)) == acceptance_length(answers)
    assert kept_per_position([arriving(1, tokens=None)]) is None  # a server, which may join passes
    assert kept_per_position([arriving()]) == []


def test_answers_that_loop_are_left_out():
    loops, calm = arriving(4, 4, tokens=(7,) * 40), arriving(2, 1, tokens=tuple(range(40)))
    figures = record(run([loops, calm]))
    assert figures["acceptance_length"] == 11 / 4
    assert figures["without_loops"] == {"requests": 1, "acceptance_length": 1.5}
    assert figures["by_category"]["qa"]["without_loops"] == figures["without_loops"]


def test_accepted_per_position_is_of_what_was_verified():
    drafters = {"a": DraftCounts(9, [4, 2], [3, 0]), "b": DraftCounts(9, [4, 0, 1], [1, 0, 1])}
    figures = record(run([answer()], stats=Stats(drafters=drafters)))
    assert figures["accepted_per_position"] == [0.5, 0.0, 1.0]


def test_record_has_the_keys_of_the_contract():
    stats = Stats(steps=4, step_s=1.0, draft_s=0.2, target_s=0.6, k_histogram=[1, 0, 3])
    figures = record(run([answer(tokens=(1, 2, 3))], stats=stats))
    keys = """draft concurrency repeat overlap requests prompt_tokens output_tokens wall_s output_tokens_per_s
        ttft_ms tpot_ms e2e_ms steps drafted_tokens verified_tokens accepted_tokens acceptance_length
        kept_per_position without_loops repeat_share peak_rss_mb by_category
        accepted_per_position k_histogram draft_ms target_ms host_ms hidden_ms control_ms"""
    assert set(keys.split()) <= set(figures)
    assert set(figures["ttft_ms"]) == set(figures["tpot_ms"]) == set(figures["e2e_ms"]) == {"mean", "p50", "p99"}
    assert figures["draft_ms"] == pytest.approx(50.0)
    assert figures["host_ms"] == pytest.approx(50.0)
    assert list(figures["by_category"]) == ["qa"]
    assert figures["prediction_error"] is figures["estimated_speedup"] is None
    known = Stats(steps=4, predictions=Predictions(step_s=2.0, error_s=0.5, plain_s=3.0))
    figures = record(run([answer(tokens=(1, 2, 3))], stats=known))
    assert (figures["prediction_error"], figures["estimated_speedup"]) == (0.25, 1.5)


def test_one_stall_is_most_of_the_error_and_nothing_of_the_middle_one():
    reckoned = Predictions()
    for step_s, predicted_s in ((1.0, 1.05), (1.0, 0.92), (2.0, 1.8), (50.0, 1.0), (1e-3, 1.0)):
        reckoned.count(StepAccounting(step_s, predicted_s, plain_s=1.0))
    assert reckoned.error == pytest.approx((0.05 + 0.08 + 0.2 + 49 + 0.999) / 54.001)
    assert reckoned.median_error == pytest.approx(0.1)
    assert Predictions().median_error is None
    later = Stats(predictions=reckoned).since(Stats(predictions=Predictions(errors=[0, 0, 0, 0, 0, 1])))
    assert sum(later.predictions.errors) == 4


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf")])
def test_a_prediction_that_is_no_number_is_as_wrong_as_any(seconds):
    reckoned = Predictions()
    reckoned.count(StepAccounting(1.0, 1.0, plain_s=3.0))
    reckoned.count(StepAccounting(1.0, seconds, plain_s=seconds))
    assert reckoned.error == pytest.approx(1.0)
    assert reckoned.speedup == pytest.approx(2.0)
    assert sum(reckoned.errors) == 2


def test_speedups_are_ratios_within_a_repeat():
    """A machine that is twice as slow in the second repeat changes rates, not speed-ups."""
    slow = (1.0, 2.0)
    records = []
    for repeat, pace in enumerate(slow):
        plain = answer(times=[pace * t for t in (1, 2, 3, 4)])
        fast = answer(times=[pace * t for t in (0.5, 1, 1.5, 2)])
        records += [record(run([fast], "ngram", 1, repeat)), record(run([plain], "off", 1, repeat))]
    first, second = summary(records)
    assert (first["draft"], second["draft"]) == ("off", "ngram")
    assert second["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert second["speedup_tpot"]["median"] == 2.0
    assert first["output_tokens_per_s"] == 0.75


def test_without_plain_decoding_there_is_no_speedup():
    (only,) = summary([record(run([answer()], "ngram"))])
    assert only["speedup"]["median"] is None


def test_categories_stand_beside_plain_decoding():
    plain = [answer(times=(1, 2), category="qa"), answer(times=(2, 4), category="rag")]
    fast = [answer(times=(0.5, 1), category="qa"), answer(times=(2, 4), category="rag")]
    rows = category_rows([record(run(plain)), record(run(fast, "ngram"))])
    assert [(r[0], r[2], r[-2]) for r in rows] == [
        ("off", "qa", "1.00x"),
        ("off", "rag", "1.00x"),
        ("ngram", "qa", "2.00x"),
        ("ngram", "rag", "1.00x"),
    ]
