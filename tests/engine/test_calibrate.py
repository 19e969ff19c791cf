"""Measuring what steps cost where there is little room: for texts, for KV, in the queue."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from paceline.control.cost import Curve
from paceline.control.policy import Work
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.draft.lookup.suffix import SuffixDrafter
from paceline.engine.assembly.auto import measure, profile_file
from paceline.engine.assembly.build import assemble
from paceline.engine.assembly.calibration import Grid, calibrate, room
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from tests.engine.same_text import (
    PLAIN,
    Settings,
    assert_same,
    draft_weights,
    make_engine,
    plain_answers,
    run,
    target,
)
from tests.engine.test_faults import REQUESTS
from tests.engine.test_same_text import AUTO

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.backend.seam import Decoder
    from paceline.backend.target import ReadyPass
    from paceline.core.nouns import Batch, Draft, Verdict
    from paceline.engine.engine import Engine

MANY = Grid(num_rows=(1, 4, 16), ks=(0, 1, 3), drafter_ks=(1, 3), repeats=2, seconds=60.0)
ONE = Grid(num_rows=(1,), ks=(0,), drafter_ks=(), repeats=1, seconds=60.0)


def shorten(engine: Engine, max_len: int) -> Engine:
    """Admit texts of so many tokens only, fewer than a config may ask for: a model may have such a context."""
    engine.scheduler.limits = replace(engine.scheduler.limits, max_len=max_len)
    return engine


@pytest.mark.parametrize("max_len", range(5, 14))
def test_rows_that_end_in_the_last_step_leave_no_answer_behind(max_len: int) -> None:
    engine = shorten(make_engine("suffix:shared=4096,k=4", PLAIN), max_len)
    calibrate(engine, ONE)
    engine.step()
    drafter = engine.drafting.drafters["suffix"]
    assert isinstance(drafter, SuffixDrafter)
    assert not drafter._shared


@pytest.mark.parametrize(("num_pages", "most"), [(1, 1), (2, 1), (10, 4), (20, 4), (31, 16)])
def test_rows_for_which_there_are_no_pages_are_left_out(num_pages: int, most: int) -> None:
    """A row is given a page to grow into beside its own, so that 31 pages are for 16 rows."""
    engine = make_engine("draft-model:model=noisy,k=4", Settings(num_pages=num_pages))
    found = calibrate(engine, MANY)
    assert max(found.cost.drafters[0].by_rows[0].counts) == most or most == 1
    assert min(found.cost.target.by_tokens.counts) == 1
    assert engine.stats().preemptions == 0
    engine.check()


def test_a_short_queue_does_not_keep_rows_from_being_measured() -> None:
    engine = make_engine("draft-model:model=noisy,k=4", PLAIN)
    engine.scheduler.limits = replace(engine.scheduler.limits, max_queued_tokens=6)
    found = calibrate(engine, MANY)
    assert 16 in found.cost.target.by_tokens.counts
    assert max(found.cost.drafters[0].by_rows[0].counts) == 16


@pytest.mark.parametrize(
    ("max_len", "prefill_tokens"), [(3, 1), (5, 512), (8, 1), (16, 512), (20, 1), (32, 512), (60, 1), (60, 512)]
)
def test_short_texts_end_in_the_middle_and_others_take_their_place(max_len: int, prefill_tokens: int) -> None:
    settings = Settings(prefill_tokens=prefill_tokens)
    engine = shorten(make_engine(AUTO, settings), max_len)
    found = calibrate(engine, MANY)
    curve, suffix_cost, drafting = found.cost.target.by_tokens, *found.cost.drafters
    assert curve.counts[0] == 1
    assert np.isfinite(curve.seconds).all()
    assert (curve.seconds > 0).all()
    assert all(p.work.tokens > 0 < p.seconds for p in found.passes)
    assert suffix_cost.max_depth == 0
    if max_len >= 16:
        assert {1, 2, 4} <= set(curve.counts)
        assert drafting.max_depth == 3
    if max_len >= 16 and prefill_tokens == 512:
        assert {1, 2, 4, 8, 16, 32, 64} == set(curve.counts)
        assert max(drafting.by_rows[0].counts) == 16


@pytest.mark.parametrize("max_len", [16, 32])
def test_costs_of_short_texts_are_not_taken_for_those_of_long_ones(
    max_len: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    base = EngineConfig(draft=AUTO, backend="native", weights="int8", kv="i16", threads=1)
    for limits in (Limits(4, max_len), Limits(4, 256), Limits(4, max_len), Limits(4, max_len)):
        built = assemble(replace(base, limits=limits), target("int8"), partial(draft_weights, types="int8"))
        engine = built.engine
        params = SamplingParams(temperature=0.0, max_tokens=max_len - 4, ignore_eos=True)
        answers = run(engine, [Request(str(i), (5, 9, 13, 7), params, seed=i) for i in range(3)])
        assert all(len(a.token_ids) == max_len - 4 for a in answers.values())
        error = engine.stats().predictions.error
        assert error is not None
        assert np.isfinite(error)
    assert len(list((tmp_path / "profiles").glob("*.json"))) == 2
    assert any("measured on this machine before" in choice.why for choice in built.choices)


def test_room_says_nothing_where_there_is_enough() -> None:
    engines = [make_engine("off", Settings(num_pages=n)) for n in (16, 256, 512)]
    assert room(engines[1]) == room(engines[2]) != room(engines[0])
    assert room(shorten(engines[1], 60)) != room(engines[2])


def test_ctrl_c_waits_for_the_step_and_leaves_the_engine_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell starts jobs in the background with SIGINT ignored; here it must work as in the foreground."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = make_engine("ngram:k=2", PLAIN)
    judge, judged = engine.judge, []

    def pressed(*arguments: Any) -> Verdict:
        judged.append(1)
        if len(judged) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        assert len(judged) < 200, "it spins"
        return judge(*arguments)

    try:
        with monkeypatch.context() as within, pytest.raises(KeyboardInterrupt):
            within.setattr(engine, "judge", pressed)
            calibrate(engine, MANY)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not engine.has_work
    assert_same(plain_answers(REQUESTS), run(engine, REQUESTS))


def test_an_engine_whose_step_failed_is_not_stepped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = make_engine("ngram:k=2", PLAIN), []

    def failing(*_: object) -> None:
        steps.append(1)
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine, "score", failing)
    with pytest.raises(RuntimeError, match="out of order"):
        calibrate(engine, MANY)
    assert len(steps) == 1


def test_a_long_text_is_measured_beside_a_short_one_on_a_machine_that_drifts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("off", Settings(prefix_cache=True))
    request, now, passes = engine.target.request, [0.0], [0]

    def seconds(keys: int) -> float:
        return 1e-3 + 1e-6 * keys

    def slower_and_slower(batch: Batch, draft: Draft) -> ReadyPass:
        passes[0] += 1
        now[0] += seconds(sum(r.max_len - r.max_drafts - 1 for r in batch.rows)) * 1.004 ** passes[0]
        return request(batch, draft)

    monkeypatch.setattr(engine.target, "request", slower_and_slower)
    monkeypatch.setattr("paceline.engine.step.perf_counter", lambda: now[0])
    grid = Grid(num_rows=(1,), ks=(0, 3), drafter_ks=(), repeats=5, seconds=60.0)
    plain = [p for p in calibrate(engine, grid).passes if p.work.tokens == 1 and not p.work.unscored]
    short, long = sorted(plain, key=lambda p: int(p.work.kv_tokens))
    assert long.work.kv_tokens > 4 * short.work.kv_tokens
    truth = seconds(int(long.work.kv_tokens)) / seconds(int(short.work.kv_tokens))
    assert long.seconds / short.seconds == pytest.approx(truth, abs=0.03)


# Backends that pad passes to buckets -------------------------------------------------------------

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 64)
DEVICE = "a card of the tests, exact"


class Padding:
    """A decoder that says it replays graphs of so many tokens."""

    def __init__(self, inner: Decoder, buckets: tuple[int, ...], device: str) -> None:
        self._inner = inner
        self.capabilities = replace(inner.capabilities, token_buckets=buckets, device=device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def padded(engine: Engine, buckets: tuple[int, ...] = BUCKETS, device: str = DEVICE) -> Engine:
    engine.target.decoder = Padding(engine.target.decoder, buckets, device)  # type: ignore[assignment]
    return engine


def test_each_bucket_is_measured_and_prices_are_a_staircase(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a pass moves on by what its bucket costs."""
    engine = padded(make_engine("off", Settings(prefix_cache=True)))
    request, now = engine.target.request, [0.0]
    stairs = Curve.of(BUCKETS, [2.0, 2.0, 2.1, 2.2, 2.6, 3.0, 3.1, 5.0], stepped=True)

    def by_bucket(batch: Batch, draft: Draft) -> ReadyPass:
        now[0] += float(stairs(sum(r.num_known for r in batch.rows) + draft.num_tokens))
        return request(batch, draft)

    monkeypatch.setattr(engine.target, "request", by_bucket)
    monkeypatch.setattr("paceline.engine.step.perf_counter", lambda: now[0])
    found = calibrate(engine, Grid(num_rows=(1, 8), ks=(0, 1, 3), drafter_ks=(), repeats=2, seconds=600.0))
    curve = found.cost.target.by_tokens
    assert curve.stepped
    assert set(BUCKETS) <= set(curve.counts)
    for tokens in range(1, 65):
        assert float(found.cost.target(Work(tokens))) == pytest.approx(float(stairs(tokens)), rel=0.02)


def test_keys_are_priced_by_many_rows_where_one_would_leave_the_device_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to some keys a pass costs the same; the keys of one row are fewer."""
    engine = padded(make_engine("off", Settings(num_rows=8, prefix_cache=True)))
    request, now, key_s = engine.target.request, [0.0], 1e-5

    def by_keys(batch: Batch, draft: Draft) -> ReadyPass:
        keys = sum(r.max_len - r.max_drafts - 1 for r in batch.rows)
        now[0] += 2e-3 + key_s * max(0, keys - 100)
        return request(batch, draft)

    monkeypatch.setattr(engine.target, "request", by_keys)
    monkeypatch.setattr("paceline.engine.step.perf_counter", lambda: now[0])
    target = calibrate(engine, Grid(num_rows=(1, 8), ks=(0,), drafter_ks=(), repeats=2, seconds=600.0)).cost.target
    assert key_s / 2 < target.kv_token_s + target.pair_s < 2 * key_s


def test_a_drafter_is_timed_at_its_deepest() -> None:
    """Depths beyond the measured ones would cost nothing."""
    engine = make_engine("draft-model:model=noisy", PLAIN)
    (drafter,) = engine.drafting.drafters.values()
    drafter.needs = replace(drafter.needs, max_k=4)
    found = calibrate(engine, Grid(num_rows=(1,), ks=(0,), drafter_ks=(1, 8), repeats=2, seconds=60.0))
    assert [cost.max_depth for cost in found.cost.drafters] == [4]


@pytest.mark.parametrize("buckets", [(8, 16, 64), (1,), (1, 2, 3), (512,), (1 << 20,)])
def test_any_buckets_can_be_measured(buckets: tuple[int, ...]) -> None:
    found = calibrate(padded(make_engine("draft-model:model=noisy,k=4", PLAIN), buckets), MANY)
    curve = found.cost.target.by_tokens
    assert curve.stepped
    assert (curve.seconds > 0).all()
    assert curve.counts[0] == buckets[0]


def test_prices_are_kept_for_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    config = EngineConfig(draft="off")
    engines = [
        make_engine("off", PLAIN),
        padded(make_engine("off", PLAIN)),
        padded(make_engine("off", PLAIN), device="a card of the tests, fast"),
        padded(make_engine("off", PLAIN), buckets=(1, 2)),
    ]
    assert len({profile_file(engine, config, "tiny") for engine in engines}) == 4
    about = measure(engines[1], config, "tiny", ONE).about
    assert (about["device"], about["buckets"]) == (DEVICE, list(BUCKETS))
    assert not {"device", "buckets"} & set(measure(engines[0], config, "tiny", ONE).about)


def test_prices_are_kept_for_a_drafters_files_not_for_their_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    engine, found = make_engine("off", PLAIN), []
    for named in (tmp_path, file := tmp_path / "model.gguf"):
        config = EngineConfig(draft=f"auto:suffix+draft-model:model={named}")
        for numbers in (b"one", b"two", b"one"):
            file.write_bytes(numbers)
            found.append(profile_file(engine, config, "tiny"))
    assert found[::3] == found[2::3]
    assert len(set(found)) == 4
