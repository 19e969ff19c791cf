"""The prefix cache on disk: same texts, read instead of computed, over restarts, faults and any schedule."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from time import monotonic, sleep
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import precondition, rule

from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS, Plan
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine import kv_disk
from paceline.engine.assembly.kv_choices import as_bytes
from paceline.engine.kv_disk import KvDisk
from paceline.engine.kv_files import PageFiles
from tests.engine.same_text import Settings, assert_same, make_engine, run, target
from tests.engine.test_scheduler import BruteForceBackend, LateSchedulerMachine, SchedulerMachine

if TYPE_CHECKING:
    from numpy import uint8
    from numpy.typing import NDArray

    from paceline.engine.engine import Engine

CACHING = Settings(num_rows=3, prefix_cache=True)
LONG = tuple(32 + (i * 7 + i // 16) % 30 for i in range(150))  # nine full pages


def wait_for(what: object, seconds: float = 120.0) -> None:
    end_s = monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert monotonic() < end_s, "it never happened"
        sleep(0.002)


def request(prompt: tuple[int, ...] = LONG, name: str = "r", salt: str = "") -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=12, seed=3), seed=3, salt=salt)


def ask(engine: Engine, *requests: Request) -> dict[str, object]:
    return run(engine, list(requests) or [request()])  # type: ignore[return-value]


def written(engine: Engine) -> int:
    """Pages on disk, once all that were published are."""
    pool = engine.scheduler.pool
    engine.scheduler.publish()
    assert pool.disk is not None
    files = pool.disk.files
    wait_for(lambda: all(page_hash in files for page_hash in pool._by_hash))
    return len(files)


@pytest.mark.parametrize("types", ["int8", "f64"])
def test_a_restarted_engine_reads_what_it_had_computed(types: str, tmp_path: Path) -> None:
    plain = ask(make_engine("off", CACHING, types=types))
    first = make_engine("off", CACHING, types=types, kv_disk=tmp_path / "kv")
    assert_same(plain, ask(first))  # type: ignore[arg-type]
    count = written(first)
    assert count >= len(LONG) // PAGE_TOKENS
    first.close()
    again = make_engine("off", CACHING, types=types, kv_disk=tmp_path / "kv")
    assert again.gauges().num_disk_pages == count
    assert_same(plain, ask(again))  # type: ignore[arg-type]
    stats = again.stats()
    assert stats.kv_disk.pages_read == len(LONG) // PAGE_TOKENS
    assert stats.cached_tokens == stats.kv_disk.pages_read * PAGE_TOKENS
    assert stats.kv_disk.failures == 0
    again.close()


def test_drafters_draft_behind_what_was_read(tmp_path: Path) -> None:
    plain = ask(make_engine("off", CACHING, types="int8"))
    for _ in range(2):
        engine = make_engine("draft-model:model=noisy,k=4", CACHING, types="int8", kv_disk=tmp_path / "kv")
        assert_same(plain, ask(engine))  # type: ignore[arg-type]
        assert engine.stats().drafters["draft-model"].accepted > 0
        engine.close()


def test_salts_and_types_share_nothing(tmp_path: Path) -> None:
    engine = make_engine("off", CACHING, types="int8", kv_disk=tmp_path / "kv")
    ask(engine, request(salt="one"))
    written(engine)
    engine.forget()
    ask(engine, request(salt="two"))
    assert engine.stats().kv_disk.pages_read == 0
    ask(engine, request(salt="one"))
    assert engine.stats().kv_disk.pages_read == 9
    engine.close()
    other = make_engine("off", CACHING, types="int4", kv_disk=tmp_path / "kv")
    ask(other, request(salt="one"))
    assert other.stats().kv_disk.pages_read == 0
    other.close()


def test_broken_pages_are_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = ask(make_engine("off", CACHING, types="int8"))
    engine = make_engine("off", CACHING, types="int8", kv_disk=tmp_path / "kv")
    ask(engine)
    written(engine)
    hashes = list(engine.scheduler.pool._by_hash)
    engine.forget()
    name = hashes[5].hex()
    path = tmp_path / "kv" / name[:2] / f"{name[2:]}.kv"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert_same(plain, ask(engine))  # type: ignore[arg-type]
    assert engine.stats().kv_disk.pages_read == 5
    assert engine.stats().kv_disk.failures == 1
    assert "is not used: it is cut short, changed" in caplog.text
    assert written(engine) == len(hashes)  # it was computed and written again
    engine.close()


def test_slow_reading_is_left_out_and_tried_again(tmp_path: Path) -> None:
    engine = make_engine("off", CACHING, types="int8", kv_disk=tmp_path / "kv")
    disk = engine.scheduler.pool.disk
    assert disk is not None
    ask(engine)
    written(engine)
    hashes = list(engine.scheduler.pool._by_hash)
    disk.learn(1000, 1000, 1.0)
    disk._read_s = 1.3 * PAGE_TOKENS / 1000
    assert disk.worth(hashes) == 0
    assert disk.worth(hashes[: kv_disk.LEAST_PAGES - 1]) == 0
    wait_for(lambda: disk.worth(hashes) == len(hashes))
    engine.close()


def test_what_a_token_takes_is_learnt_where_prompts_are_read(tmp_path: Path) -> None:
    """A pass that only decodes does not tell; beside prompts all tokens count, drafts too."""
    engine = make_engine("draft-model:model=noisy,k=4", CACHING, types="int8", kv_disk=tmp_path / "kv")
    disk, told = engine.scheduler.pool.disk, list[tuple[int, int]]()
    assert disk is not None
    disk.learn = lambda *said: told.append(said[:2])  # type: ignore[method-assign]
    ask(engine)
    assert told[0] == (len(LONG), len(LONG))
    assert {num_prefill for num_prefill, _ in told[1:]} == {0}
    assert max(num_tokens for _, num_tokens in told[1:]) > 1
    del disk.learn
    disk.learn(0, 320, 1.0)
    assert disk._token_s == np.inf
    disk.learn(kv_disk.LEARNT_TOKENS, 320, 1.0)
    assert disk._token_s == 1 / 320
    engine.close()


def test_a_disk_that_stalls_holds_no_request_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did not bring is computed, and what it brings later is written nowhere."""
    plain = ask(make_engine("off", CACHING, types="int8"))
    engine = make_engine("off", CACHING, types="int8", kv_disk=tmp_path / "kv")
    disk = engine.scheduler.pool.disk
    assert disk is not None
    ask(engine)
    written(engine)
    engine.forget()
    goes_on, read, left = Event(), PageFiles.read, iter(range(3))

    def stalls(files: PageFiles, page_hash: bytes, to: NDArray[uint8]) -> bool:
        if next(left, None) is None:
            goes_on.wait(120)
        return read(files, page_hash, to)

    monkeypatch.setattr(PageFiles, "read", stalls)
    monkeypatch.setattr(kv_disk, "STALL_S", 0.02)
    assert_same(plain, ask(engine))  # type: ignore[arg-type]
    assert disk._stalled is not None
    assert (disk._stalled.num_read, engine.stats().cached_tokens) == (3, 3 * PAGE_TOKENS)
    engine.forget()
    assert_same(plain, ask(engine))  # type: ignore[arg-type]
    assert engine.stats().kv_disk.failures == 1, "it is not asked again while it stalls"
    goes_on.set()
    wait_for(disk._stalled.done.is_set)
    assert disk._stalled.num_read == 3
    assert_same(plain, ask(engine))  # type: ignore[arg-type]  # from pages that were the stalled one's
    engine.forget()
    assert_same(plain, ask(engine))  # type: ignore[arg-type]
    assert engine.stats().kv_disk.pages_read == 3 + len(LONG) // PAGE_TOKENS
    engine.close()


def test_a_full_disk_costs_a_pause_and_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PageFiles, "write", full)
    plain = ask(make_engine("off", CACHING, types="int8"))
    engine = make_engine("off", CACHING, types="int8", kv_disk=tmp_path / "kv")
    assert_same(plain, ask(engine))  # type: ignore[arg-type]
    wait_for(lambda: engine.stats().kv_disk.failures > 0)
    ask(engine, request(name="another"))
    assert engine.stats().kv_disk.failures == 1
    engine.close()


def test_a_request_that_is_cancelled_while_it_is_read_gives_its_pages_back(tmp_path: Path) -> None:
    engine = make_engine("off", CACHING, types="int8", kv_disk=tmp_path / "kv")
    ask(engine)
    written(engine)
    engine.forget()
    engine.add(request())
    engine.scheduler.schedule(Plan())
    assert engine.scheduler.pool.disk is not None
    assert engine.scheduler.pool.disk.reading is not None
    engine.check()
    engine.cancel("r")
    while engine.has_work:
        engine.step()
        engine.check()
    wait_for(lambda: engine.scheduler.schedule(Plan()) and not engine.scheduler.pool.num_held)
    assert engine.scheduler.pool.num_held == 0
    engine.close()


def test_a_start_that_fails_gives_the_folder_free(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-profile") as held:
        make_engine("auto:ngram", CACHING, profile="no-profile", kv_disk=tmp_path / "kv")
    make_engine("off", CACHING, types="int8", kv_disk=tmp_path / "kv").close()
    assert held.value.__traceback__ is not None, "as a prompt keeps it"


def test_a_backend_that_moves_no_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps its KV where it computes"):
        make_engine("off", CACHING, types="cuda", kv_disk=tmp_path / "kv")


@pytest.mark.parametrize("types", ["int8", "int4", "f64"])
def test_a_page_comes_back_bit_for_bit(types: str) -> None:
    engine = make_engine("off", CACHING, types=types)
    ask(engine)
    kv, other = as_bytes(engine.target.kv), as_bytes(target(types).decoder.new_kv(4))
    assert kv.page_bytes == PAGE_TOKENS * kv.bytes_per_token
    page = next(iter(engine.scheduler.pool._by_hash.values()))
    data, copy, left = (np.zeros(kv.page_bytes, np.uint8) for _ in range(3))
    kv.read_page(page, data)
    other.write_page(2, data)
    other.read_page(2, copy)
    assert data.any()
    assert (copy == data).all()
    for untouched in (1, 3):
        other.read_page(untouched, left)
        assert not left.any()


# Any schedule ------------------------------------------------------------------------------------


class TextPages:
    """The brute-force backend's memory as pages of bytes: each slot is the number of a text."""

    page_bytes = PAGE_TOKENS * 8
    bytes_per_token = 8

    def __init__(self, memory: dict[int, tuple[int, ...]]) -> None:
        self.memory = memory
        self.texts: dict[tuple[int, ...], int] = {}

    def read_page(self, page: int, to: NDArray[uint8]) -> None:
        slots = range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        texts = [self.memory[slot] for slot in slots]
        to.view(np.int64)[:] = [self.texts.setdefault(text, len(self.texts)) for text in texts]

    def write_page(self, page: int, data: NDArray[uint8]) -> None:
        texts = list(self.texts)
        for i, number in enumerate(data.view(np.int64).tolist()):
            self.memory[page * PAGE_TOKENS + i] = texts[number]


class DiskMachine(SchedulerMachine):
    """Pages go to disk and come back, which no text notices."""

    def attach(self) -> None:
        self.temporary = TemporaryDirectory()
        backend = self.backend
        assert isinstance(backend, BruteForceBackend)
        self.kv = TextPages(backend.memory)
        files = PageFiles(Path(self.temporary.name) / "kv", (150 + self.kv.page_bytes) * 12)
        self.disk = self.scheduler.pool.disk = KvDisk(files, self.kv)

    @precondition(lambda self: not hasattr(self, "disk"))
    @rule()
    def begin(self) -> None:
        self.attach()

    @precondition(lambda self: hasattr(self, "disk"))
    @rule()
    def evict_all(self) -> None:
        """Once all is written, everything that no row holds leaves the memory."""
        wait_for(lambda: not self.disk._wanted and self.disk._copying is None)
        self.scheduler.publish()
        pool = self.scheduler.pool
        while pool._idle:  # `forget` is for an engine at rest: pages that rows share would be no page of the cache
            pool._free.append(pool._evict())

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            while self.scheduler.requests:
                self.step(4)
            self.step(0)  # pages that were read for a cancelled request
            self.scheduler.check()
            assert self.scheduler.pool.num_held == 0
        if hasattr(self, "disk"):
            self.disk.close()
            self.temporary.cleanup()


class LateDiskMachine(DiskMachine, LateSchedulerMachine):
    """The disk machine with outcomes revealed one step late."""


@pytest.fixture(autouse=True)
def _short_prompts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.cls is not None:
        monkeypatch.setattr(kv_disk, "LEAST_PAGES", 1)


_SETTINGS = settings(
    max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
)
TestDisk = DiskMachine.TestCase
TestDisk.settings = _SETTINGS
TestLateDisk = LateDiskMachine.TestCase
TestLateDisk.settings = _SETTINGS


def test_the_machine_does_read_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would show nothing."""
    monkeypatch.setattr(kv_disk, "LEAST_PAGES", 1)
    machine = DiskMachine()
    machine.start(num_rows=2, num_pages=12, prefill_tokens=16, caching=True, seed=1)
    machine.attach()
    for _ in range(3):
        machine.arrive(length=70, stem=1, max_tokens=2, salt=False)
        machine.run(max_k=2, steps=20)
        machine.evict_all()
        machine.adds_up()
    assert machine.disk.counts.pages_read > 0
    machine.teardown()


def test_a_reading_that_nobody_waits_for_stops(tmp_path: Path) -> None:
    """The reading's request is gone: others are admitted after the current page, and nothing counts as broken."""
    first = make_engine("off", CACHING, types="int8", kv_disk=tmp_path / "kv")
    ask(first)
    written(first)
    first.close()
    engine = make_engine("off", CACHING, types="int8", kv_disk=tmp_path / "kv")
    disk = engine.scheduler.pool.disk
    assert disk is not None
    read, begun, held = disk.files.read, Event(), Event()

    def slow(page_hash: bytes, to: object) -> bool:
        begun.set()
        held.wait(120)
        return read(page_hash, to)  # type: ignore[arg-type]

    disk.files.read = slow  # type: ignore[method-assign]
    engine.add(request(name="a"))
    engine.step()
    assert begun.wait(120)
    engine.cancel("a")
    engine.add(request((5, 6, 7), name="b"))
    engine.step()  # not admitted yet, and the reading is told
    assert disk.reading.stopped
    held.set()
    while engine.has_work:
        engine.step()
    assert engine.stats().kv_disk.pages_read <= 1
    assert engine.stats().kv_disk.failures == 0
    engine.close()
