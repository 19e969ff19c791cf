"""Rows whose layers all slide: pages behind the window come back, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from paceline.core.nouns import PAGE_TOKENS, BatchRow
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine import kv_disk, sliding_pages
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.prefix_cache import chain_hash, root_hash
from paceline.engine.request_table import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.sliding_pages import SlidingPool
from tests.engine.test_kv_disk import DiskMachine, written
from tests.engine.test_scheduler import BruteForceBackend, LateSchedulerMachine, SchedulerMachine

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.engine.engine import Engine

# Any schedule ------------------------------------------------------------------------------------


class WindowBackend(BruteForceBackend):
    """Reads what a pass of layers that slide reads: from the step before the window of its first token on."""

    window = 1

    def first_read(self, row_computed: int, r: BatchRow) -> int:
        return max(row_computed - self.window + 1, 0) // sliding_pages.WINDOW_STEP * sliding_pages.WINDOW_STEP


class WindowMachine(SchedulerMachine):
    """Prompts longer than all pages together, with a small window."""

    @initialize(
        num_rows=st.integers(1, 4),
        window=st.integers(1, 100),
        spare=st.integers(0, 10),
        prefill_tokens=st.sampled_from([1, 16, 40, 64]),
        caching=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def start(  # type: ignore[override]
        self, num_rows: int, window: int, spare: int, prefill_tokens: int, caching: bool, seed: int
    ) -> None:
        limits = Limits(num_rows, max_len=1 << 14, prefill_tokens=prefill_tokens, max_queued_tokens=4000)
        self.scheduler = Scheduler(limits, SlidingPool(0, caching=caching, window=window))
        num_pages = self.scheduler._most_pages + spare
        self.scheduler.pool = SlidingPool(num_pages, caching=caching, window=window)
        self.backend = WindowBackend(self.lag, Random(seed))
        self.backend.window = window
        self.random = Random(seed)
        self.written: dict[str, list[int]] = {}
        self.steps_without_token = 0

    @rule(length=st.integers(200, 700), stem=st.integers(0, 1), max_tokens=st.integers(1, 150))
    def arrive_long(self, length: int, stem: int, max_tokens: int) -> None:
        self.arrive(length, stem, max_tokens, salt=False)


class LateWindowMachine(WindowMachine, LateSchedulerMachine):
    """The machine of windows with outcomes revealed one step late."""


_SETTINGS = settings(
    max_examples=40, stateful_step_count=15, suppress_health_check=list(HealthCheck), deadline=None
)
TestWindows = WindowMachine.TestCase
TestWindows.settings = _SETTINGS
TestLateWindows = LateWindowMachine.TestCase
TestLateWindows.settings = _SETTINGS


class WindowDiskMachine(WindowMachine, DiskMachine):
    """The machine of windows with pages that come back from disk."""


def test_what_windows_read_from_disk_is_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_disk, "LEAST_PAGES", 1)
    firsts: list[int] = []
    for seed in range(8):
        random, machine = Random(seed), WindowDiskMachine()
        window, spare = random.randint(1, 100), random.randint(0, 10)
        machine.start(num_rows=2, window=window, spare=spare, prefill_tokens=40, caching=True, seed=seed)
        machine.attach()
        machine.disk.files.max_bytes *= 8
        for _ in range(8):
            length, max_tokens = random.randint(100, 600), random.randint(1, 40)
            machine.arrive(length=length, stem=seed % 2, max_tokens=max_tokens, salt=False)
            for _ in range(random.randint(5, 40)):
                machine.run(max_k=2, steps=1)
                firsts += [machine.disk.reading.first] if machine.disk.reading else []
            machine.evict_all()
            machine.adds_up()
        machine.teardown()
    assert any(firsts), "what is behind a window is not read"


# The prefix cache --------------------------------------------------------------------------------


def hashes_of(count: int) -> list[bytes]:
    hashes = [root_hash("", "")]
    for index in range(count):
        hashes.append(chain_hash(hashes[-1], [index] * PAGE_TOKENS))
    return hashes[1:]


def test_a_prefix_is_found_by_its_last_pages() -> None:
    pool, hashes = SlidingPool(40, window=40), hashes_of(20)
    held = pool.take(20)
    for page, page_hash in zip(held, hashes, strict=True):
        pool.publish(page, page_hash)
    pool.give_back(held)  # page 0 is evicted first
    gone = pool.take(30)  # the first ten are gone
    assert pool.match(hashes) == []
    first, found = pool.match_window(hashes)
    assert (first, found[first:]) == (pool.first_page(20), held[pool.first_page(20) :])
    assert first * PAGE_TOKENS <= 20 * PAGE_TOKENS - 40 + 1 < first * PAGE_TOKENS + sliding_pages.WINDOW_STEP
    pool.give_back(pool.held(found, first))
    first, found = pool.match_window(hashes[:11])
    assert (first, found) == (0, [])  # the pages before are needed, too
    pool.give_back(gone)


def test_a_drafter_with_a_store_keeps_all_pages() -> None:
    pool = SlidingPool(8, ("drafter",), window=16)
    assert not pool.slides
    assert pool.first_page(100) == 0
    pool.drop_store("drafter")
    assert pool.first_page(100) > 90


# Engines -----------------------------------------------------------------------------------------

WINDOW = 48


@cache
def loaded(backend: str) -> build.Loaded:
    return build.load(config(backend))


def config(backend: str, **changes: object) -> EngineConfig:
    model = f"shape:num_layers=2,hidden_size=64,intermediate_size=96,vocab_size=300,window={WINDOW},slides=1"
    weights = {"native": "int8", "reference": "f64"}[backend]
    limits = Limits(num_rows=3, max_len=4096, prefill_tokens=64)
    return EngineConfig(model=model, backend=backend, weights=weights, draft="off", limits=limits, **changes)  # type: ignore[arg-type]


def engine(backend: str, **changes: object) -> Engine:
    return build.assemble(config(backend, **changes), replace(loaded(backend), content="shape")).engine


def answers(built: Engine, count: int = 3) -> list[tuple[int, ...]]:
    random = Random(5)
    texts: dict[str, tuple[int, ...]] = {}
    for index in range(count):
        prompt = tuple(random.randrange(256) for _ in range(500 + 50 * index))
        params = SamplingParams(max_tokens=90, temperature=0.8, ignore_eos=True)
        built.add(Request(f"r{index}", prompt, params, seed=index))
        texts[f"r{index}"] = ()
    while built.has_work:
        for outcome in built.step():
            texts[outcome.request_id] += outcome.token_ids
        built.check()
    return list(texts.values())


@pytest.mark.parametrize(("backend", "count"), [("native", 3), ("reference", 1)])
def test_few_pages_write_the_same_texts_as_many(backend: str, count: int) -> None:
    many = engine(backend, kv_tokens=8192, prefix_cache=False)
    few = engine(backend, kv_tokens=384, prefix_cache=False)  # less than one of the prompts
    assert few.scheduler.max_len == 4096
    expected = answers(many, count)
    assert answers(few, count) == expected
    assert many.scheduler.num_preemptions == 0
    cached = engine(backend, kv_tokens=640)
    assert answers(cached, count) == expected
    assert answers(cached, 1) == expected[:1]
    assert cached.stats().cached_tokens > 0


def test_pages_on_disk_go_with_windows(tmp_path: Path) -> None:
    expected = answers(engine("native", kv_tokens=8192))
    writer = engine("native", kv_tokens=8192, kv_disk=tmp_path / "kv")
    assert answers(writer) == expected
    written(writer)
    writer.close()
    reader = engine("native", kv_tokens=640, kv_disk=tmp_path / "kv")
    assert answers(reader) == expected
    assert reader.stats().kv_disk.pages_read > 0
    reader.close()
