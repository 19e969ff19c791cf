"""Models of which some layers slide: what these hold of pages behind the window goes, and nothing else changes."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from paceline import kernels
from paceline.backend.page_bytes import Budget
from paceline.backend.reference.attention import KVStore
from paceline.core.nouns import PAGE_TOKENS, BatchRow, Plan
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.draft.drafter import DraftWeights
from paceline.draft.registry import parse_drafters
from paceline.engine import sliding_pages
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.kv_choices import KvRoom, kv_room
from paceline.engine.kv_disk import Reading
from paceline.engine.pages import pages_for
from paceline.engine.request_table import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.sliding_pages import SlidingPool, most_pages
from paceline.engine.window_parts import PartedPool
from paceline.model.config import Heads, Rope, Sliding
from tests.engine.same_text import KV_TYPES, Answer, make_decoder
from tests.engine.test_kv_disk import written
from tests.engine.test_scheduler import BruteForceBackend, LateSchedulerMachine, SchedulerMachine, TrueRow
from tests.engine.test_windows import answers, hashes_of
from tests.engine.trees import plant
from tests.serve.test_faults import eventually
from tests.tiny import tiny_config, tiny_tokenizer, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.seam import Decoder
    from paceline.engine.engine import Engine
    from paceline.engine.kv_events import PageChain

# Any schedule ------------------------------------------------------------------------------------


@dataclass
class PartsBackend(BruteForceBackend):
    """Reads all of a row in some layers, and a window of it in others, whose part of pages can be dropped."""

    window: int = 1
    pool: PartedPool | None = None
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # as `memory`, in sliding layers

    def drop(self, page: int) -> None:
        for slot in range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS):
            self.parts.pop(slot, None)

    def drop_rest(self, page: int) -> None:
        for slot in range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS):
            self.memory.pop(slot, None)

    def check_memory(self) -> None:
        """All that was written and not dropped counts, as no system takes it back by itself."""
        pool = self.pool
        assert pool is not None
        rest, parts = ({slot // PAGE_TOKENS for slot in slots} for slots in (self.memory, self.parts))
        assert all(pool._refs[page] or page in pool._idle or page in pool._freed for page in rest)
        assert all(pool._there[page] for page in parts)
        assert len(rest) * pool.budget.page + len(parts) * pool.budget.part <= pool._used <= pool.budget.total

    def _write(self, row: TrueRow, start: int, text: tuple[int, ...]) -> None:
        super()._write(row, start, text)
        assert self.pool is not None
        for position in range(start, len(text)):
            slot = self._slot(row, position)
            assert self.pool._there[slot // PAGE_TOKENS], "a pass writes a window part that takes no memory"
            self.parts[slot] = text[: position + 1]

    def first_read(self, row_computed: int, r: BatchRow) -> int:
        self.check_memory()
        row = self.rows[r.row]
        first = max(row_computed - self.window + 1, 0) // sliding_pages.WINDOW_STEP * sliding_pages.WINDOW_STEP
        for position in range(first, row_computed + r.num_known):
            text = self.parts.get(self._slot(row, position))
            assert text == row.text[: position + 1], "a window was dropped, or overwritten"
        return 0 if self.random.random() < 0.1 else first  # reading all takes long


class PartsMachine(SchedulerMachine):
    """Pages that suffice, with memory for few window parts."""

    @initialize(
        num_rows=st.integers(1, 4),
        window=st.integers(1, 100),
        num_pages=st.integers(6, 60),
        costs=st.tuples(st.integers(1, 3), st.integers(1, 6)),
        spare=st.integers(0, 30),
        prefill_tokens=st.sampled_from([5, 16, 40, 64]),
        caching=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def start(  # type: ignore[override]
        self,
        num_rows: int,
        window: int,
        num_pages: int,
        costs: tuple[int, int],
        spare: int,
        prefill_tokens: int,
        caching: bool,
        seed: int,
    ) -> None:
        limits = Limits(num_rows, max_len=1 << 14, prefill_tokens=prefill_tokens, max_queued_tokens=4000)
        page, part = costs
        least = num_pages * page + min(num_pages, most_pages(window, prefill_tokens)) * part
        self.backend = PartsBackend(self.lag, Random(seed), window=window)
        budget = Budget(page, part, min(least + spare, num_pages * (page + part)))
        drop, rest = self.backend.drop, self.backend.drop_rest
        pool = PartedPool(num_pages, caching=caching, window=window, budget=budget, drop=drop, drop_rest=rest)
        self.backend.pool = pool
        self.scheduler = Scheduler(limits, pool)
        self.random = Random(seed)
        self.written: dict[str, list[int]] = {}
        self.steps_without_token = 0

    @rule(length=st.integers(150, 500), stem=st.integers(0, 1), max_tokens=st.integers(1, 150))
    def arrive_long(self, length: int, stem: int, max_tokens: int) -> None:
        self.arrive(length, stem, max_tokens, salt=False)

    @rule()
    def forget(self) -> None:
        self.scheduler.publish()
        self.scheduler.pool.forget()


class LatePartsMachine(PartsMachine, LateSchedulerMachine):
    """The machine of window parts with outcomes revealed one step late."""


_SETTINGS = settings(
    max_examples=40, stateful_step_count=15, suppress_health_check=list(HealthCheck), deadline=None
)
TestParts = PartsMachine.TestCase
TestParts.settings = _SETTINGS
TestLateParts = LatePartsMachine.TestCase
TestLateParts.settings = _SETTINGS


# The prefix cache --------------------------------------------------------------------------------


def parted(num_pages: int, total: int, window: int = 40) -> tuple[PartedPool, list[int]]:
    """A pool whose pages take 1 and whose window parts take 3, and the parts that it dropped."""
    dropped: list[int] = []
    budget = Budget(1, 3, total)
    return PartedPool(
        num_pages, window=window, budget=budget, drop=dropped.append, drop_rest=lambda _: None
    ), dropped


def published(pool: PartedPool, count: int) -> tuple[list[int], list[bytes]]:
    """Pages of a row that has ended; its windows slid away first."""
    held, hashes = pool.take(count), hashes_of(count)
    for page, page_hash in zip(held, hashes, strict=True):
        pool.publish(page, page_hash)
    past = pool.slide(held, 0, count)
    pool.give_back(reversed(pool.held(held, past)))
    return held, hashes


def test_windows_of_ended_rows_go_last() -> None:
    pool, dropped = parted(40, total=80)
    held, hashes = published(pool, 20)
    assert not dropped, "nothing goes while there is room"
    past = pool.first_page(20)
    more = pool.take(pool.num_available - 2)  # there is room for a few parts only
    assert dropped == [*reversed(held[:past]), *reversed(held)][: len(dropped)]
    pool.give_back(reversed(pool.held(more)))
    assert 0 < past < 20
    pool.check([])
    first, found = pool.match_window(hashes)
    assert (first, found) in ((past, held), (0, []))


def test_a_prefix_is_found_by_its_window_and_all_its_pages() -> None:
    pool, dropped = parted(40, total=20 + 3 * 20)
    held, hashes = published(pool, 20)
    more = pool.take(3)
    past = pool.first_page(20)
    assert 0 < len(dropped) <= past, "what slid away goes first"
    assert pool.match_window(hashes) == (past, held)
    pool.give_back(reversed(pool.held(held, past)))
    cut = hashes[: held.index(dropped[0]) + 1]
    first, found = pool.match_window(cut)
    assert len(found) < len(cut), "a window part that it needs is dropped"
    assert not set(found[first:]) & set(dropped)
    pool.give_back(reversed(pool.held(found, first)))
    pool.give_back(pool.held(more))
    pool.check([])


def test_a_page_with_its_part_takes_the_place_of_one_without() -> None:
    pool, dropped = parted(40, total=20 + 3 * 20)
    held, hashes = published(pool, 20)
    more = pool.take(5)
    gone = dropped[0]
    index = held.index(gone)
    again = more[0]
    pool.publish(again, hashes[index])
    assert pool._by_hash[hashes[index]] == again
    assert gone in pool._free
    pool.give_back(pool.held(more))
    pool.check([])


def test_drafts_that_are_refused_drop_nothing_while_there_is_room() -> None:
    pool, dropped = parted(40, total=4 * 8)
    row = pool.take(6)
    spare = pool.take(1)
    for _ in range(3):
        pool.give_back(pool.held(spare))
        pool.check([pool.held(row)])
        assert pool.take(1) == spare, "the page that is in memory"
    assert not dropped
    pool.give_back(pool.held(spare))
    more = pool.take(0, 8)
    assert dropped == spare
    pool.check([pool.held(row), pool.held(more, 0, 8)])


def test_memory_counts_for_admission() -> None:
    pool, _ = parted(100, total=100 + 3 * 12)
    assert pool.num_available == 136 // 4
    assert pool.fits(12, 88)
    assert not pool.fits(13, 88)
    assert pool.needed(total=100, past=0, found=0, most=12) == (12, 88)
    pages_held = pool.take(12, 88)
    assert pool.num_available == 0
    assert pool.num_held == 100
    assert pool.grow(pages_held, 88, most=5) == 88, "all parts are held"
    assert pool.slide(pages_held, 0, 4 + 40 // PAGE_TOKENS + 2) == 4
    assert pool.grow(pages_held, 88, most=9) == 84
    pool.give_back(pool.held(pages_held, 4, 84))
    pool.check([])


@pytest.mark.parametrize(("total", "newer"), [(125, "abc"), (137, "abcdef")])
def test_an_older_prompt_waits_for_no_newer_answer(total: int, newer: str) -> None:
    """The other group's short prompts began beside it, and their answers hold all window parts."""
    pool, _ = parted(300, total=total)
    scheduler = Scheduler(Limits(8, prefill_tokens=16), pool)

    def step(group: int | None = None) -> set[str]:
        batch = scheduler.schedule(Plan(), group)
        for r in batch.rows:
            scheduler.reveal(r, scheduler.requests[r.request_id], (7,) if r.samples else ())
        scheduler.check()
        return {r.request_id for r in batch.rows}

    old = scheduler.add(Request("old", (1,) * 900, SamplingParams(max_tokens=9), 0))
    step(0)
    for name in newer:
        scheduler.add(Request(name, (ord(name),) * 5, SamplingParams(max_tokens=2000), 0))
    for _ in range(20):
        step(1)
    waited = 0
    while not old.decoding:
        waited = 0 if "old" in step() else waited + 1
        assert waited <= 1, "it waits for newer ones"
    assert scheduler.num_preemptions, "window parts were short"


@dataclass
class AllOnDisk:
    """A disk that has every page, and ends each reading at once."""

    reading: Reading | None = None
    counts: list[int] = field(default_factory=list)

    def worth(self, hashes: Sequence[bytes]) -> int:
        return len(hashes)

    def begin(self, chain: PageChain, first: int, held: list[int], hashes: list[bytes]) -> None:
        self.counts.append(len(hashes))
        self.reading = Reading(chain, first, held, hashes, num_read=len(hashes))
        self.reading.done.set()

    def offer(self, page: int, page_hash: bytes) -> None:
        """Do nothing: the disk has the page already."""

    def withdraw(self, page: int) -> None:
        """Nothing is being copied."""


def test_reading_leaves_what_rows_need_and_goes_on_when_parts_have_gone() -> None:
    pool, dropped = parted(100, total=60 + 3 * 12)
    scheduler = Scheduler(Limits(num_rows=2, prefill_tokens=16), pool)
    params = SamplingParams(max_tokens=4)
    scheduler.add(Request("short", tuple(range(40)), params, 0))
    scheduler.schedule(Plan())
    disk: Any = AllOnDisk()
    pool.disk = disk
    scheduler.add(Request("long", tuple(range(1, 16 * 40)), params, 0))
    admitted = None
    while admitted is None:
        admitted = next(iter(scheduler.schedule(Plan()).admissions), None)
        if disk.reading is not None:
            assert len(disk.counts) < 10
            assert pool.num_available >= 1, "a page is left for the row that runs"
        scheduler.check()
    assert len(disk.counts) > 1
    assert sum(disk.counts) == 39
    assert admitted.cached_len == 39 * PAGE_TOKENS
    assert dropped


def test_a_window_is_all_that_is_read_where_all_layers_slide() -> None:
    pool, disk = SlidingPool(40, window=100), AllOnDisk()
    scheduler = Scheduler(Limits(num_rows=2, prefill_tokens=16), pool)
    pool.disk = disk  # type: ignore[assignment]
    scheduler.add(Request("long", tuple(range(1, 16 * 40)), SamplingParams(max_tokens=4), 0))
    admissions = [one for _ in range(2) for one in scheduler.schedule(Plan()).admissions]
    assert [one.cached_len for one in admissions] == [39 * PAGE_TOKENS]
    assert disk.counts == [39 - pool.first_page(39)]
    scheduler.check()


# Engines -----------------------------------------------------------------------------------------

WINDOW = 48
SHAPE = f"shape:num_layers=4,hidden_size=64,intermediate_size=96,vocab_size=320,window={WINDOW}"
TIGHT = 900  # tokens of KV


@cache
def loaded(backend: str) -> build.Loaded:
    return build.load(config(backend))


def config(backend: str, **changes: Any) -> EngineConfig:
    weights = {"native": "int8", "reference": "f64"}[backend]
    limits = Limits(num_rows=3, max_len=4096, prefill_tokens=64)
    options: dict[str, Any] = {"draft": "off"} | changes
    return EngineConfig(model=SHAPE, backend=backend, weights=weights, limits=limits, **options)


def poison(engine: Engine) -> list[int]:
    """Overwrite what is dropped of pages, so that whoever reads one writes another text."""
    kv: Any = engine.target.kv
    pool, windows = engine.scheduler.pool, engine.target.config.windows
    assert isinstance(pool, PartedPool)
    dropped: list[int] = []
    drop_part, drop_rest, sliding = pool._drop, pool._drop_rest, engine.target.config.sliding_kv()
    rest = [i for i in range(len(engine.target.config.kv_heads())) if i not in sliding]

    def overwrite(page: int, layers: Sequence[int]) -> None:
        if isinstance(kv, KVStore):
            for i in layers:
                kv.data[i][:, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = torch.nan
        else:  # all layers have equal heads
            data = np.empty((engine.target.config.num_layers, kv.page_bytes // len(windows)), np.uint8)
            kv.read_page(page, data.reshape(-1))
            data[list(layers)] = 255
            kv.write_page(page, data.reshape(-1))

    def poisoned(page: int) -> None:
        drop_part(page)
        dropped.append(page)
        overwrite(page, sliding)

    def rest_poisoned(page: int) -> None:
        drop_rest(page)
        overwrite(page, rest)

    pool._drop, pool._drop_rest = poisoned, rest_poisoned
    return dropped


def budget_of(room: KvRoom, decoder: Decoder) -> Budget:
    """The memory that pages take, whether any may go or not."""
    kv: Any = decoder.new_kv(1)
    part, whole = (PAGE_TOKENS * size for size in (kv.window_bytes_per_token, kv.bytes_per_token))
    return room.budget or Budget(whole - part, part, room.num_pages * whole)


def engine(backend: str, monkeypatch: pytest.MonkeyPatch, free_parts: int = 0, **changes: Any) -> Engine:
    """An engine with memory for its pages, one row's window parts and some more."""
    asked = config(backend, **changes)
    loaded_one = replace(loaded(backend), content="shape")
    room = kv_room(asked, asked.limits, loaded_one.decoder)
    b = budget_of(room, loaded_one.decoder)
    least = room.num_pages * b.page + (most_pages(WINDOW, asked.limits.prefill_tokens) + free_parts) * b.part
    share = 1 if asked.kv_tokens else 2
    monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda: share * least)
    same = DraftWeights(loaded_one.decoder, loaded_one.vocabulary)
    built = build.assemble(asked, loaded_one, lambda *_: same)
    pool = built.engine.scheduler.pool
    assert least >= room.num_pages * b.whole if pool.budget is None else pool.budget.total == least
    return built.engine


@pytest.mark.parametrize(
    ("backend", "count", "draft"), [("native", 3, "off"), ("native", 3, "ngram"), ("reference", 1, "ngram")]
)
def test_little_memory_writes_the_same_texts_as_much(
    backend: str, count: int, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    much = engine(backend, monkeypatch, 1 << 20, kv_tokens=8192, prefix_cache=False, draft=draft)
    expected = answers(much, count)
    assert much.scheduler.num_preemptions == 0
    little = engine(backend, monkeypatch, kv_tokens=TIGHT, prefix_cache=False, draft=draft)
    dropped = poison(little)
    assert answers(little, count) == expected
    assert len(dropped) > 2 * count
    cached = engine(backend, monkeypatch, 8, kv_tokens=2 * TIGHT, draft=draft)
    poison(cached)
    assert answers(cached, count) == expected
    for _ in range(2):
        assert answers(cached, 1) == expected[:1]
    assert cached.stats().cached_tokens > 0
    cached.close()


@pytest.mark.parametrize("backend", ["native"])
def test_halves_of_the_rows_in_turn_write_the_same_texts(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(engine(backend, monkeypatch, 1 << 20, kv_tokens=8192, prefix_cache=False), 2)
    turns = engine(backend, monkeypatch, kv_tokens=TIGHT, draft="ngram", overlap="on")
    poison(turns)
    assert answers(turns, 2) == expected
    turns.close()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_branches_write_the_same_texts(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine(backend, monkeypatch, 1 << 20, kv_tokens=8192, prefix_cache=False)
    expected = answers(plain, 2)
    drafting = engine(backend, monkeypatch, kv_tokens=TIGHT, draft="ngram:min=1,max=4,k=3")
    poison(drafting)
    of_requests = {f"r{index}": Answer(token_ids=list(text)) for index, text in enumerate(expected)}
    drafter = plant(drafting, of_requests, seed=1)
    assert answers(drafting, 2) == expected
    assert drafter.kept_beside > 10
    drafting.close()


@pytest.mark.parametrize("draft", ["draft-model:model=same", "draft-model:layers=2"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_drafters_over_the_same_pages_write_the_same_texts(
    backend: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(engine(backend, monkeypatch, 1 << 20, kv_tokens=8192, prefix_cache=False), 2)
    drafting = engine(backend, monkeypatch, kv_tokens=TIGHT, draft=draft)
    dropped = poison(drafting)
    assert answers(drafting, 2) == expected
    assert dropped
    stats = drafting.stats()
    assert stats.drafter_failures == 0
    if draft.endswith("same"):
        assert drafting.scheduler.pool.stores
        assert stats.decode_passes < 100, "it drafts what its target writes"
    drafting.close()


def test_gauges_tell_of_pages_or_memory_what_is_fuller(monkeypatch: pytest.MonkeyPatch) -> None:
    little = engine("native", monkeypatch, kv_tokens=2 * TIGHT)
    pool = little.scheduler.pool
    assert little.gauges().num_held_pages == 0
    fit = pool.num_available
    assert fit < pool.num_pages
    half = pool.take(fit // 2)
    assert little.gauges().num_held_pages / pool.num_pages == pytest.approx(len(half) / fit, abs=0.02)
    pool.give_back(pool.held(half))
    num_bare = pool.num_pages - 12
    row = pool.take(12, num_bare)
    assert little.gauges().num_held_pages == pool.num_pages
    pool.give_back(pool.held(row, 0, num_bare))
    assert little.gauges().num_held_pages == 0


def test_pages_on_disk_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(engine("native", monkeypatch, 1 << 20, kv_tokens=8192))
    writer = engine("native", monkeypatch, 1 << 20, kv_tokens=8192, kv_disk=tmp_path / "kv")
    assert answers(writer) == expected
    written(writer)
    writer.close()
    reader = engine("native", monkeypatch, kv_tokens=TIGHT, kv_disk=tmp_path / "kv")
    assert answers(reader) == expected
    assert reader.stats().kv_disk.pages_read > 0
    reader.close()


FAMILIES = {
    "gemma3": tiny_config("gemma3_text", num_layers=6, sliding=Sliding(40, frozenset({0, 1, 2, 3, 4}), Rope())),
    "gpt-oss": tiny_config("gpt_oss", num_layers=4, sliding=Sliding(23, frozenset({0, 2}), Rope())),
    "heads of two sizes, shared": tiny_config(
        "gemma4_text", num_layers=6, sliding=Sliding(40, frozenset({0, 2, 4}), Rope()), num_sharing=2
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("types", ["int8", "int4"])
def test_families_write_the_same_texts(family: str, types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(FAMILIES[family], vocab_size=320, eos_ids=(319,), max_context=4096)
    few = replace(few, global_heads=Heads(1, 2 * few.head_dim)) if few.num_sharing else few
    decoder = make_decoder(few, tiny_weights(few, seed=4), types)
    target = build.Loaded("tiny", decoder, tiny_tokenizer(320), None, "tiny", content="tiny")
    asked = replace(config("native", draft="ngram", kv_tokens=TIGHT), weights=types, kv=KV_TYPES[types])
    texts = []
    for free in (1 << 30, 0):
        monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda free=free: free)
        built = build.assemble(replace(asked, kv_tokens=TIGHT if not free else 8192), target).engine
        pool = built.scheduler.pool
        assert isinstance(pool, PartedPool) == (not free), "pages are whole where all fit"
        texts.append(answers(built, 2))
    assert texts[0] == texts[1]


# Memory ------------------------------------------------------------------------------------------


def test_pages_take_what_layers_see(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config("native")
    room = kv_room(asked, asked.limits, loaded("native").decoder)
    assert room.budget is None, "whole pages fit"
    kv, whole = loaded("native").decoder.new_kv(1), budget_of(room, loaded("native").decoder)
    assert whole.whole == kv.bytes_per_token * PAGE_TOKENS
    assert whole.page == whole.part, "two of four layers slide"
    assert whole.of_row(100, most_parts=8) == 108 * whole.part
    assert room.num_pages == pages_for(3 * 4096)
    assert whole.total == room.num_pages * whole.whole
    most = most_pages(WINDOW, 64) * whole.part
    monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda: 2 * (most + 500 * whole.page))
    room = kv_room(asked, asked.limits, loaded("native").decoder)
    assert room.num_pages == 500, "twice as many as would fit whole, but for a window"
    assert room.budget is not None
    assert room.budget.total == most + 500 * whole.page
    assert "2 of 4 layers see 48 tokens" in room.why
    head, lookup = (parse_drafters(spec).configs for spec in ("draft-model:model=x", "suffix"))
    assert kv_room(asked, asked.limits, loaded("native").decoder, drafters=lookup) == room
    drafting = kv_room(asked, asked.limits, loaded("native").decoder, drafters=head)
    as_before = (most + 500 * whole.page) // whole.whole
    assert as_before < drafting.num_pages < 500
    assert drafting.budget is not None
    own = (drafting.num_pages - as_before) * whole.whole  # at most, of the drafter for further pages
    assert drafting.budget.total + own <= most + 500 * whole.page


def test_pages_are_whole_where_the_system_takes_no_parts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, decoder = config("native", kv_tokens=16_000), loaded("native").decoder
    monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda: 0)
    assert kv_room(asked, asked.limits, decoder).budget is not None
    monkeypatch.setattr("sys.platform", "darwin")
    assert kv_room(asked, asked.limits, decoder).budget is None


def test_tokens_asked_for_take_free_memory_and_equals_have_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, decoder = config("native", kv_tokens=16_000), loaded("native").decoder
    budget = budget_of(kv_room(asked, asked.limits, decoder), decoder)
    free = 700 * budget.whole
    monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda: free)
    first = kv_room(asked, asked.limits, decoder)
    assert first.num_pages == 1000
    assert first.budget == replace(budget, total=free), "not the usual share of it"
    halves = replace(asked, sharers=2)
    free //= 4
    equal = first.settled(asked, decoder.new_kv(1)).pin(halves)
    assert kv_room(equal, equal.limits, decoder) == first
    unpinned = kv_room(halves, halves.limits, decoder).budget
    assert unpinned is not None
    assert unpinned.total < free * 4
    free = 10_000 * budget.whole
    whole = kv_room(asked, asked.limits, decoder)
    assert whole.budget is None
    free = 0
    equal = whole.settled(asked, decoder.new_kv(1)).pin(halves)
    assert kv_room(equal, equal.limits, decoder) == whole


def test_kv_goes_with_the_engine_and_whoever_reads_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with some later collection: a worker whose memory was given back hardly does a thing."""
    made = engine("native", monkeypatch, kv_tokens=TIGHT)
    pool = made.scheduler.pool
    log, gone = pool.tell(), ref(pool)
    made.close()
    del made
    gc.collect()
    gc.disable()
    try:
        del log, pool
        assert gone() is None
    finally:
        gc.enable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells resident memory")
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_dropped_parts_leave_memory(backend: str) -> None:
    """Layer 0 slides, and has 64 MiB."""
    kv: Any
    num_pages, heads = 256, [Heads(8, 256), Heads(8, 128)]
    if backend == "native":
        kv = kernels.KVStore("f32", num_pages, heads, [0])
    else:
        kv = KVStore.of(heads, num_pages, torch.float32, "cpu", [0])
    data = np.full(kv.page_bytes, 1, np.uint8)
    for page in range(num_pages):
        kv.write_page(page, data)
    full = resident_bytes()
    assert kv.window_bytes_per_token == 2 * 8 * 256 * 4
    for page in range(1, num_pages):
        kv.drop_window(page)
    assert full - resident_bytes() > 0.9 * num_pages * PAGE_TOKENS * kv.window_bytes_per_token
    kept = resident_bytes()
    for page in range(num_pages // 2, num_pages):
        kv.drop_rest(page)
    rest = kv.bytes_per_token - kv.window_bytes_per_token
    assert kept - resident_bytes() > 0.9 * num_pages // 2 * PAGE_TOKENS * rest
    kv.read_page(num_pages - 1, data)
    assert not data.any(), "all of it is gone"
    kv.read_page(0, data)
    assert (data == 1).all()
    kv.read_page(7, data)
    assert (data == 1).sum() >= len(data) // 3, "the other layer keeps its page"
    kv.write_page(7, np.full(kv.page_bytes, 2, np.uint8))
    kv.read_page(7, data)
    assert (data == 2).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells resident memory")
def test_memory_of_the_next_pages_is_there_before_they_are_written() -> None:
    """Not that of all pages, and not what sliding layers have of them."""
    heads, num_pages = [Heads(4, 64), Heads(4, 32)], 4096
    ahead = 256 * PAGE_TOKENS * 4
    before = resident_bytes()
    kv = kernels.KVStore("f32", num_pages, heads)
    wanted = 2 * 4 * (64 + 32) * ahead
    assert eventually(lambda: resident_bytes() - before > 0.9 * wanted)
    sliding = kernels.KVStore("f32", num_pages, heads, [0])
    rest = 2 * 4 * 32 * ahead
    assert eventually(lambda: resident_bytes() - before > wanted + 0.9 * rest)
    time.sleep(0.1)
    assert resident_bytes() - before < 1.2 * (wanted + rest) + (16 << 20)
    assert kv.num_pages == sliding.num_pages == num_pages
