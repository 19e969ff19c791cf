"""A router that applies the events of the prefix cache knows what the page pool finds, in any schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, precondition, rule

from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine import kv_disk
from paceline.engine.assembly.kv_event_options import KvEventsConfig
from paceline.engine.assembly.owner import flush
from paceline.engine.kv_events import BlockRemoved, BlockStored, KvEventLog, told_hash
from paceline.engine.pages import PagePool
from paceline.engine.prefix_cache import chain_hash, root_hash
from paceline.engine.request_state import RequestState
from paceline.engine.window_parts import PartedPool
from paceline.engine.wire import encode
from paceline.serve.worker.kv_publisher import batch_of
from tests.engine.same_text import make_engine, run
from tests.engine.test_kv_disk import CACHING, LONG, LateDiskMachine, ask, request, written
from tests.engine.test_scheduler import LateSchedulerMachine, SchedulerMachine
from tests.engine.test_window_parts import PartsMachine
from tests.engine.test_windows import WindowMachine
from tests.oracles.kv_index import ArrayBatch, KvIndex, MapBatch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from paceline.engine.engine import Engine

CONFIG = KvEventsConfig(endpoint="ipc:///events")


def true_hash(text: tuple[int, ...], salt: str) -> int:
    """Return the 64 bits of a text's last page."""
    page_hash = root_hash("", salt)
    for start in range(0, len(text), 16):
        page_hash = chain_hash(page_hash, text[start : start + 16])
    return told_hash(page_hash)


class Follower(SchedulerMachine):
    """A machine whose pool an index follows."""

    def follow(self) -> KvIndex:
        pool = self.scheduler.pool
        if pool.events is None:
            self.log, self.index = pool.tell(), KvIndex()
        for event in (events := self.log.take()):
            if pool.window == 1 and isinstance(event, BlockStored) and event.parent_block_hash is not None:
                # A token that sees only itself needs no page before its own, so nobody has told of that one.
                self.index.texts.setdefault(event.parent_block_hash, ("unknown", ()))
        if events:
            self.index.apply(bytes(encode(batch_of(events, CONFIG))))
        return self.index

    @invariant()
    def an_index_knows_what_the_pool_finds(self) -> None:
        index = self.follow()
        assert index.pages == {told_hash(page_hash) for page_hash in self.found()}
        for told in index.pages:
            mark, text = index.texts[told]
            known = true_hash(text, "salt" if mark else "")
            assert told == known or self.scheduler.pool.window == 1, "it is not the hash of its text"

    @precondition(lambda self: not self.scheduler.running and self.scheduler.pool.disk is None)
    @rule()
    def forget(self) -> None:
        self.scheduler.publish()
        self.scheduler.pool.forget()

    def found(self) -> Iterable[bytes]:
        """Return the hashes of pages that some request can find."""
        return self.scheduler.pool._by_hash


class LateFollower(Follower, LateSchedulerMachine):
    """Outcomes are revealed one step late."""


class WindowFollower(Follower, WindowMachine):
    """Pages behind a window come back."""


class PartsFollower(Follower, PartsMachine):
    """Pages lose their window parts."""

    def follow(self) -> KvIndex:
        self.hashes: dict[bytes, list[bytes]]  # of every page that was published: those of its text up to it
        pool = self.scheduler.pool
        if pool.events is None:
            self.hashes, publish = {}, pool.publish

            def noted(page: int, page_hash: bytes, chain: RequestState, index: int) -> None:
                self.hashes[page_hash] = chain.hashes[1 : index + 2]
                publish(page, page_hash, chain, index)

            pool.publish = noted  # type: ignore[method-assign, assignment]
        return super().follow()

    def found(self) -> Iterable[bytes]:
        """Look at every prefix whose pages are all there, with the parts of its last window."""
        pool, found = self.scheduler.pool, set[bytes]()
        assert isinstance(pool, PartedPool)
        for hashes in map(self.hashes.__getitem__, pool._by_hash):
            pages = [pool._by_hash.get(page_hash, -1) for page_hash in hashes]
            if min(pages) >= 0 and all(pool._there[page] for page in pages[pool.first_page(len(pages)) :]):
                found.update(hashes)
        return found


class DiskFollower(Follower, LateDiskMachine):
    """Pages come back from disk."""


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_disk, "LEAST_PAGES", 1)


_SETTINGS = settings(
    max_examples=30, stateful_step_count=20, suppress_health_check=list(HealthCheck), deadline=None
)
TestFollower = Follower.TestCase
TestFollower.settings = _SETTINGS
TestLateFollower = LateFollower.TestCase
TestLateFollower.settings = _SETTINGS
TestWindowFollower = WindowFollower.TestCase
TestWindowFollower.settings = _SETTINGS
TestPartsFollower = PartsFollower.TestCase
TestPartsFollower.settings = _SETTINGS
TestDiskFollower = DiskFollower.TestCase
TestDiskFollower.settings = _SETTINGS


def chain_of(token_ids: tuple[int, ...], salt: str = "") -> RequestState:
    asked = Request("r", token_ids, SamplingParams(), seed=0, salt=salt)
    state = RequestState(asked, 0, [root_hash("", salt)], list(token_ids), len(token_ids))
    state.page_hashes(len(token_ids) // 16)
    return state


def test_pages_one_after_another_are_one_event() -> None:
    pool, chain = PagePool(4), chain_of(LONG[:70])
    log = pool.tell()
    pages = pool.take(4)
    for index, page in enumerate(pages):
        pool.publish(page, chain.hashes[index + 1], chain, index)
    pool.give_back(reversed(pages))
    pool.take(3)
    stored, removed = log.take()
    told = [told_hash(page_hash) for page_hash in chain.hashes[1:]]
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == (told, None)
    assert stored.token_ids == list(LONG[:64])
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == told[:0:-1]
    assert not log.waits


@pytest.mark.parametrize(("form", "batch"), [("map", MapBatch), ("array", ArrayBatch)])
def test_both_forms_say_the_same(form: str, batch: type[MapBatch | ArrayBatch]) -> None:
    events, index = KvEventLog(), KvIndex(batch)
    events.cleared()
    for salt in ("", "salt"):
        chain = chain_of(LONG[:48], salt)
        for page in range(3):
            events.stored(chain.hashes[page + 1], chain, page)
        events.removed(chain.hashes[3])
    config = KvEventsConfig(endpoint="ipc:///events", event_form=form, rank=3)
    index.apply(bytes(encode(batch_of(events.take(), config))))
    assert (index.rank, index.clears) == (3, 1)
    assert index.pages == {true_hash(LONG[:end], salt) for end in (16, 32) for salt in ("", "salt")}
    mark = chain.hashes[0][:8].hex()
    assert (index.cached_len(LONG[:40]), index.cached_len(LONG[:40], mark)) == (32, 32)
    assert index.cached_len(LONG[:40], "another") == 0


def followed(engine: Engine, index: KvIndex) -> KvIndex:
    """Take in what an engine's pool tells."""
    engine.scheduler.publish()
    pool = engine.scheduler.pool
    assert isinstance(pool.events, KvEventLog)
    index.apply(bytes(encode(batch_of(pool.events.take(), CONFIG))))
    assert index.pages == {told_hash(page_hash) for page_hash in pool._by_hash}
    return index


def test_an_index_foretells_prefix_hits() -> None:
    engine, index = make_engine("off", CACHING), KvIndex()
    engine.scheduler.pool.events = KvEventLog()
    ask(engine)
    followed(engine, index)
    for cut in (15, 16, 17, 100, len(LONG)):
        prompt = (*LONG[:cut], 33, 34, 35)
        foretold, before = index.cached_len(prompt), engine.stats().cached_tokens
        assert foretold == cut // 16 * 16
        run(engine, [request(prompt, f"cut-{cut}")])
        assert engine.stats().cached_tokens - before == foretold
        followed(engine, index)
    flush(engine)
    assert followed(engine, index).pages == set()


def test_pages_read_from_disk_are_told_of(tmp_path: Path) -> None:
    engine, index = make_engine("off", CACHING, types="int8", kv_disk=tmp_path / "kv"), KvIndex()
    engine.scheduler.pool.events = KvEventLog()
    ask(engine)
    written(engine)
    before = set(followed(engine, index).pages)
    engine.forget()
    assert followed(engine, index).pages == set()
    ask(engine)
    assert engine.stats().kv_disk.pages_read > 0
    assert followed(engine, index).pages == before
    engine.close()
