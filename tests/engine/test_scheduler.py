"""Scheduler and pages against brute force, with outcomes revealed at once and one step late.

The brute-force backend writes into every KV slot the text that the slot stands for, and reads back the whole
context of every pass: a page that is leaked, shared wrongly, freed too early or hit by mistake is seen at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline import kernels
from paceline.core.errors import PromptTooLong, QueueFull
from paceline.core.nouns import PAGE_TOKENS, Batch, BatchRow, Plan, RowPlan
from paceline.core.params import SamplingParams, Speculation
from paceline.core.request_nouns import Admission, Request
from paceline.engine.drafter_pool import DrafterPool
from paceline.engine.engine import check_room
from paceline.engine.pages import PagePool, pages_for
from paceline.engine.prefix_cache import chain_hash, root_hash
from paceline.engine.request_table import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.step_view import step_view
from tests.oracles.step_view import bounds_of as bounds_of_slow

VOCAB = 3


def next_token(text: tuple[int, ...]) -> int:
    """The target: a deterministic function of the text so far."""
    return hash((text, 7)) % VOCAB


def answer(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    text = prompt
    for _ in range(max_tokens):
        text += (next_token(text),)
    return text[len(prompt) :]


@dataclass
class TrueRow:
    text: tuple[int, ...]
    computed: int
    pages: list[int]


@dataclass
class BruteForceBackend:
    """Knows every outcome at once, and tells it `lag` steps late."""

    lag: int
    random: Random
    memory: dict[int, tuple[int, ...]] = field(default_factory=dict)  # slot -> text up to and with its token
    rows: dict[int, TrueRow] = field(default_factory=dict)
    unrevealed: deque[tuple[Batch, list[tuple[int, ...]]]] = field(default_factory=deque)

    def run(self, batch: Batch) -> None:
        for admission in batch.admissions:
            self._admit(admission)
        self.unrevealed.append((batch, [self._pass(r) for r in batch.rows]))

    def _admit(self, admission: Admission) -> None:
        text = tuple(admission.token_ids)
        self.rows[admission.row] = TrueRow(text, admission.cached_len, list(admission.pages))

    def _pass(self, r: BatchRow) -> tuple[int, ...]:
        row = self.rows[r.row]
        row.pages[r.num_kept_pages :] = r.new_pages
        text = row.text[: row.computed + r.num_known]
        assert (len(text) == len(row.text)) == r.samples, "a pass samples when it reaches the newest token"
        assert r.chunk_end == (0 if r.decodes else len(text))
        guesses = self._guess(text, r.max_drafts)
        self._write(row, row.computed, text + guesses)
        for position in range(self.first_read(row.computed, r), len(text)):
            assert self.memory[self._slot(row, position)] == text[: position + 1], "the context was overwritten"
        row.computed += r.num_known
        if not r.samples:
            return ()
        gained = self._judge(text, guesses)
        row.text += gained
        row.computed += len(gained) - 1
        assert len(row.text) <= r.max_len, "the plan was not right for this outcome"
        return gained

    def first_read(self, row_computed: int, r: BatchRow) -> int:
        """The first position that a pass reads of a row."""
        return 0

    def _guess(self, text: tuple[int, ...], k: int) -> tuple[int, ...]:
        guesses: tuple[int, ...] = ()
        for _ in range(k):
            right = self.random.random() < 0.7
            guesses += (next_token(text + guesses) if right else self.random.randrange(VOCAB),)
        return guesses

    def _judge(self, text: tuple[int, ...], guesses: tuple[int, ...]) -> tuple[int, ...]:
        gained: tuple[int, ...] = ()
        for guess in guesses:
            if guess != next_token(text + gained):
                break
            gained += (guess,)
        return (*gained, next_token(text + gained))

    def _write(self, row: TrueRow, start: int, text: tuple[int, ...]) -> None:
        for position in range(start, len(text)):
            self.memory[self._slot(row, position)] = text[: position + 1]

    def _slot(self, row: TrueRow, position: int) -> int:
        return row.pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS

    def reveal(self) -> tuple[Batch, list[tuple[int, ...]]] | None:
        return self.unrevealed.popleft() if len(self.unrevealed) > self.lag else None


class SchedulerMachine(RuleBasedStateMachine):
    lag = 0
    steps_without_oldest = 0

    @initialize(
        num_rows=st.integers(1, 5),
        num_pages=st.integers(6, 24),
        prefill_tokens=st.sampled_from([1, 7, 16, 64, 512]),
        caching=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def start(self, num_rows: int, num_pages: int, prefill_tokens: int, caching: bool, seed: int) -> None:
        limits = Limits(num_rows, max_len=1 << 14, prefill_tokens=prefill_tokens, max_queued_tokens=600)
        self.scheduler = Scheduler(limits, PagePool(num_pages, caching=caching))
        self.backend = BruteForceBackend(self.lag, Random(seed))
        self.random = Random(seed)
        self.written: dict[str, list[int]] = {}
        self.steps_without_token = 0

    @rule(length=st.integers(1, 70), stem=st.integers(0, 2), max_tokens=st.integers(1, 40), salt=st.booleans())
    def arrive(self, length: int, stem: int, max_tokens: int, salt: bool) -> None:
        """Prompts share stems, so that they part at every place in a page."""
        prompt = tuple([stem] * (length * 2 // 3) + [self.random.randrange(VOCAB) for _ in range(length // 3 + 1)])
        params = SamplingParams(max_tokens=max_tokens)
        name = f"r{len(self.written)}"
        asks = self.random.choice([None, Speculation("off"), Speculation(k=2)])
        request = Request(name, prompt, params, seed=0, salt="salt" if salt else "", speculation=asks)
        try:
            _add(self.scheduler, request)
        except PromptTooLong:
            assert len(prompt) + max_tokens > self.scheduler.capacity
        except QueueFull:
            assert self.scheduler.waiting
        else:
            self.written[name] = []

    @precondition(lambda self: self.scheduler.requests)
    @rule(pick=st.integers(0, 1 << 16))
    def cancel(self, pick: int) -> None:
        names = [name for name, r in self.scheduler.requests.items() if not r.ended]
        if names:
            self.scheduler.end(names[pick % len(names)])

    @rule(max_k=st.sampled_from([0, 1, 4, 8]), steps=st.integers(1, 8))
    def run(self, max_k: int, steps: int) -> None:
        for _ in range(steps):
            self.step(max_k)

    def step(self, max_k: int) -> None:
        plan = Plan({r.row: RowPlan("any", self.random.randint(0, max_k)) for r in self.scheduler.decoding()})
        plan.check()
        batch = self.scheduler.schedule(plan)
        batch.check()
        for row in self.scheduler.take_released():
            self.backend.rows.pop(row, None)
        assert sum(r.num_known for r in batch.rows if not r.decodes) <= self.scheduler.limits.prefill_tokens
        assert all(r.max_drafts <= max(plan.k(r.row), 0) for r in batch.rows)
        unfinished = (r for r in self.scheduler.running if not r.ended and not (r.decoding and r.remaining <= 0))
        oldest = next(unfinished, None)  # that has anything to ask for: the last tokens of others are in flight
        rests = oldest is None or not batch.rows or any(r.row == oldest.row for r in batch.rows)
        self.steps_without_oldest = 0 if rests else self.steps_without_oldest + 1
        assert self.steps_without_oldest <= 1 + self.lag, "the oldest request waits for newer ones"
        self.backend.run(batch)
        gained = 0
        if (revealed := self.backend.reveal()) is not None:
            gained = sum(self.commit(r, tokens) for r, tokens in zip(revealed[0].rows, revealed[1], strict=True))
        working = any(not r.ended for r in self.scheduler.requests.values())
        self.steps_without_token = 0 if gained or not working else self.steps_without_token + 1
        assert self.steps_without_token < 2000, "nothing moves"

    def commit(self, r: BatchRow, tokens: tuple[int, ...]) -> int:
        running = self.scheduler.requests[r.request_id]
        if running.ended:
            self.scheduler.reveal(r, running, ())
            return r.num_known
        most = running.request.params.max_tokens - len(self.written[r.request_id])
        kept = tokens[:most]
        self.written[r.request_id] += kept
        self.scheduler.reveal(r, running, kept)
        if len(kept) == most:
            assert tuple(self.written[r.request_id]) == answer(
                running.request.prompt_ids, running.request.params.max_tokens
            )
            self.scheduler.end(r.request_id)
        return r.num_known

    @invariant()
    def adds_up(self) -> None:
        self.scheduler.check()

    @invariant()
    def bounds_are_read_alike(self) -> None:
        decoding = self.scheduler.decoding()
        assert kernels.draft_bounds(decoding).tolist() == bounds_of_slow(decoding).tolist()

    def teardown(self) -> None:
        """Nothing starves: once arrivals stop, everything ends and every page comes back."""
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.requests:
            self.step(4)
        self.scheduler.check()
        assert self.scheduler.pool.num_held == 0


class LateSchedulerMachine(SchedulerMachine):
    """Outcomes are revealed one step late, as with asynchronous scheduling."""

    lag = 1


_SETTINGS = settings(max_examples=150, stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = _SETTINGS
TestLateScheduler = LateSchedulerMachine.TestCase
TestLateScheduler.settings = _SETTINGS


def _add(scheduler: Scheduler, request: Request) -> None:
    """As the engine does."""
    check_room(scheduler, request)
    scheduler.add(request)


def _request(name: str, prompt: tuple[int, ...], max_tokens: int = 4, salt: str = "") -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), seed=0, salt=salt)


def _run(scheduler: Scheduler, backend: BruteForceBackend, k: int = 0) -> Batch:
    batch = scheduler.schedule(Plan({r.row: RowPlan("any", k) for r in scheduler.decoding()}))
    scheduler.take_released()
    backend.run(batch)
    revealed = backend.reveal()
    assert revealed is not None
    for r, tokens in zip(revealed[0].rows, revealed[1], strict=True):
        scheduler.reveal(r, scheduler.requests[r.request_id], tokens)
    return batch


@pytest.mark.parametrize("shared", [15, 16, 17, 31, 32, 33])
def test_prompts_that_part_near_a_page_border_share_whole_pages_only(shared: int) -> None:
    scheduler, backend = Scheduler(Limits(num_rows=2), PagePool(16)), BruteForceBackend(0, Random(0))
    stem = (1,) * shared
    scheduler.add(_request("a", (*stem, 2, 2, 2)))
    _run(scheduler, backend)
    scheduler.add(_request("b", (*stem, 0, 0, 0)))
    batch = _run(scheduler, backend)
    assert [a.cached_len for a in batch.admissions] == [shared // PAGE_TOKENS * PAGE_TOKENS]
    scheduler.check()


def test_the_last_prompt_token_is_always_computed() -> None:
    scheduler, backend = Scheduler(Limits(num_rows=2), PagePool(16)), BruteForceBackend(0, Random(0))
    for name in "ab":
        scheduler.add(_request(name, (1,) * 32))
        batch = _run(scheduler, backend)
    assert batch.admissions[0].cached_len == 16


def test_salts_do_not_share() -> None:
    scheduler, backend = Scheduler(Limits(num_rows=2), PagePool(16)), BruteForceBackend(0, Random(0))
    for salt in ("mine", "yours"):
        scheduler.add(_request(salt, (1,) * 40, salt=salt))
        batch = _run(scheduler, backend)
    assert batch.admissions[0].cached_len == 0
    assert root_hash("model", "a") != root_hash("model", "b") != root_hash("other", "b")


def test_drafts_shrink_before_anyone_is_preempted() -> None:
    scheduler, backend = Scheduler(Limits(num_rows=2), PagePool(2)), BruteForceBackend(0, Random(0))
    scheduler.add(_request("a", (1,) * 12, max_tokens=8))
    _run(scheduler, backend)
    scheduler.add(_request("b", (2,) * 10, max_tokens=8))
    _run(scheduler, backend)
    batch = _run(scheduler, backend, k=8)
    assert batch.rows[0].max_drafts < 7
    assert scheduler.num_preemptions == 0


def test_the_newest_is_preempted_and_finishes_later() -> None:
    scheduler, backend = Scheduler(Limits(num_rows=2), PagePool(5)), BruteForceBackend(0, Random(0))
    scheduler.add(_request("old", (1,) * 20, max_tokens=50))
    scheduler.add(_request("new", (2,) * 20, max_tokens=50))
    for _ in range(40):
        _run(scheduler, backend)
        if scheduler.num_preemptions:
            break
    assert [r.request.request_id for r in scheduler.running] == ["old"]
    assert [r.request.request_id for r in scheduler.waiting] == ["new"]
    scheduler.check()


def test_too_long_and_too_many_are_refused_and_change_nothing() -> None:
    scheduler = Scheduler(Limits(num_rows=1, max_queued_tokens=50), PagePool(4))
    with pytest.raises(PromptTooLong, match="64"):
        _add(scheduler, _request("long", (1,) * 61, max_tokens=4))
    for name in ("a", "b"):
        _add(scheduler, _request(name, (1,) * 25))
    with pytest.raises(QueueFull):
        _add(scheduler, _request("c", (1,)))
    assert list(scheduler.requests) == ["a", "b"]
    scheduler.check()


def test_further_choices_of_a_text_are_not_refused_for_their_first() -> None:
    scheduler = Scheduler(Limits(num_rows=1, max_queued_tokens=50), PagePool(9))
    params = SamplingParams(max_tokens=4, n=3)
    for choice in range(3):
        _add(scheduler, Request(f"text-{choice}", (1,) * 40, params, seed=0, choice=choice))
    assert len(scheduler.waiting) == 3
    with pytest.raises(QueueFull):
        _add(scheduler, _request("other", (1,)))
    scheduler.check()


def test_stores_have_their_own_valid_counts() -> None:
    pool = PagePool(8, ("features", "drafter"))
    pages = pool.take(3)
    pool.mark_valid("features", pages, 40)
    pool.mark_valid("drafter", pages, 20)
    assert pool.valid_len("features", pages) == 40
    assert pool.valid_len("drafter", pages) == 20
    parent = root_hash("model", "")
    for page in pages[:2]:
        parent = chain_hash(parent, [0] * 16)
        pool.publish(page, parent)
    pool.give_back(reversed(pages))
    first = chain_hash(root_hash("model", ""), [0] * 16)
    assert pool.match([first, chain_hash(first, [0] * 16), b"?"]) == pages[:2]
    assert pool.valid_len("drafter", pages[:2]) == 20
    pool.check([pages[:2]])
    assert pages_for(33) == 3


def _with_long_prompt() -> Scheduler:
    """A scheduler with a prompt of 20,000 tokens behind a short one."""
    scheduler = Scheduler(Limits(num_rows=2, max_len=1 << 15, prefill_tokens=512), PagePool(4000))
    scheduler.add(_request("short", (0,) * 20, max_tokens=1000))
    scheduler.add(_request("long", (1,) * 20_000))
    return scheduler


def _chunks(scheduler: Scheduler, plan: Plan) -> list[tuple[int, int]]:
    """Run a step; return how far each prompt has come, and the tokens of its chunk."""
    rows = scheduler.schedule(plan).rows
    found = [(scheduler.requests[r.request_id].scheduled_len, r.num_known) for r in rows if not r.decodes]
    for r in rows:
        scheduler.reveal(r, scheduler.requests[r.request_id], [0] if r.samples else [])
    return found


def test_chunks_shrink_with_depth_beside_rows_that_decode() -> None:
    """Control is told of the chunks that run."""
    scheduler, drafting, sizes = _with_long_prompt(), DrafterPool([], VOCAB), []
    while not all(r.decoding for r in scheduler.running) or not scheduler.running:
        view = step_view(scheduler, drafting)
        chunks = _chunks(scheduler, Plan())
        ends, counts = [end for end, _ in chunks], [count for _, count in chunks]
        assert (view.prefill.tokens, view.prefill.kv_tokens) == (sum(counts), sum(ends))
        sizes += chunks[-1:]
    assert {size for end, size in sizes[:-1] if end <= 8192} <= {492, 512}
    assert {size for end, size in sizes[:-1] if 9000 < end <= 16_384} == {256}
    assert {size for end, size in sizes[:-1] if end > 17_000} == {170}


def test_a_plan_bounds_prompt_tokens_however_deep_they_are() -> None:
    """The plan knows what prompt tokens cost; the bound of the limits counts the depth instead."""
    scheduler, end = _with_long_prompt(), 0
    while end < 17_000:
        ((end, _),) = _chunks(scheduler, Plan())[-1:]
    assert [_chunks(scheduler, Plan(prefill_tokens=most))[0][1] for most in (16, 200, 1)] == [16, 170, 1]


def test_a_plan_bounds_the_prompts_of_a_step_together() -> None:
    scheduler = Scheduler(Limits(num_rows=4), PagePool(100))
    for number, name in enumerate("abc"):
        scheduler.add(_request(name, (number,) * 40))
    plan = Plan(prefill_tokens=50)
    assert [[count for _, count in _chunks(scheduler, plan)] for _ in range(3)] == [[40, 10], [30, 20], [20]]
