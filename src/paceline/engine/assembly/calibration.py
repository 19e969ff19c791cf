"""What does a step cost here? Measured on the engine itself, with requests that nobody reads.

Rows are filled one after another, and at each number of rows a few steps are timed with no drafts, with drafts
that cost nothing and are of no use (what verification costs), and with each real drafter, whose drafts are not
verified (what drafting costs). What matters most comes first, and when time is up the rest is left out: what was
not measured lies between or beyond what was, and real steps correct it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from paceline.control.cost import MeasuredCost, TargetCost
from paceline.control.policy import Work
from paceline.control.profile import TimedPass, fit_drafting, fit_target
from paceline.core.errors import ConfigError, QueueFull
from paceline.core.interrupts import uninterrupted
from paceline.core.nouns import Request
from paceline.core.params import SamplingParams
from paceline.engine.assembly.calibration_stubs import Always, Told
from paceline.engine.drafters import DrafterPool
from paceline.engine.serial import SerialLoop
from paceline.engine.step_view import outlook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.core.nouns import BatchRow
    from paceline.engine.engine import Engine

    Progress = Callable[[str, int, int], None]  # (what, done, total)

METHOD = 6  # of measuring; what another found is not taken up
WHAT = "measuring what steps cost"
PROMPT_LEN = 4
SHORTEST, LONGEST = 64, 1024  # tokens of the context by which the price of a key is found
CONTEXT_SHARE = 0.1  # of the time, to fill it
ENOUGH = 4096  # tokens of KV, to measure all
AHEAD = 4  # tokens that a row gains before a step with drafts: its first, two of a step that makes ready, its own
MANY = 32  # rows in place of one
NO_ROOM = (
    "there is no room to measure what a step costs: raise --max-len or --kv-tokens, or give a --profile that "
    "was measured with more"
)


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured, and how often."""

    num_rows: tuple[int, ...] = (1, 8, 32)
    ks: tuple[int, ...] = (0, 1, 3, 5, 7)  # to be verified
    drafter_ks: tuple[int, ...] = (1, 8)
    most_tokens: int = 128  # of a pass
    repeats: int = 7
    seconds: float = 2.5  # after these, nothing more is begun


QUICK = Grid()
THOROUGH = Grid((1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 3, 4, 5, 6, 8), (1, 2, 3, 4, 6, 8), 1024, 10, 120.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured: prices, and the host's share of a step."""

    cost: MeasuredCost
    names: tuple[str, ...]  # of the drafters, in the order of `cost.drafters`
    host_s: float
    passes: tuple[TimedPass, ...]


def room(engine: Engine) -> list[int]:
    """Return what of an engine's limits bears on what can be measured, none of it above where all can be.

    Tokens: of a text, of all texts, of prompts in a step, of prompts that wait.
    """
    limits, capacity = engine.scheduler.limits, engine.scheduler.capacity
    at_once = MANY * PROMPT_LEN
    longest = min(limits.max_len, capacity, 2 * LONGEST)
    return [
        longest,
        min(capacity, ENOUGH),
        min(limits.prefill_tokens, at_once),
        min(limits.max_queued_tokens, at_once),
    ]


def calibrate(engine: Engine, grid: Grid = QUICK, progress: Progress | None = None) -> Calibration:
    """Time steps of an idle engine. Counters and caches are afterwards as if nothing had happened.

    What there is no room for is left out. Raises `ConfigError` if that is everything.
    """
    kept = engine.drafting, engine.controller, engine.loop
    num_preemptions = engine.scheduler.num_preemptions
    engine.loop = SerialLoop()
    calibrator = _Calibrator(engine, grid, progress)
    try:
        calibrator.run()
    finally:
        if calibrator.whole:
            calibrator.clear()
        engine.drafting, engine.controller, engine.loop = kept
        engine.scheduler.num_preemptions = num_preemptions
        engine.forget()
        engine.reset_stats()
    return calibrator.result()


class _Probed(NamedTuple):
    """A kind of step that is timed again and again."""

    drafter: str | None  # None: what is drafted costs nothing, and is verified
    k: int


class _Rows(NamedTuple):
    """Requests that are measured with."""

    num: int
    prompt_len: int  # of each
    again: bool = False  # the same prompts each time, which the prefix cache remembers


def _told(kind: _Probed) -> Told:
    if kind.drafter is not None:
        return Told(kind.drafter, kind.k, verifies=False)
    return Told(Always.name, kind.k) if kind.k else Told()


class _Calibrator:
    def __init__(self, engine: Engine, grid: Grid, progress: Progress | None) -> None:
        self.engine, self.grid, self.progress = engine, grid, progress
        self.start = perf_counter()
        self.whole = True  # a step that raised has left rows half-way; such an engine never gets empty
        self.drafters = dict(engine.drafting.drafters)
        self.passes: list[TimedPass] = []
        self.drafting: dict[str, dict[tuple[int, int], float]] = {name: {} for name in self.drafters}
        self.hosts: list[float] = []
        self._num_added = 0
        self._rows: _Rows | None = None  # that were put in last
        self._following: str | None = None  # the drafter that has taken in all there is

    def run(self) -> None:
        e, vocab_size = self.engine, self.engine.target.config.vocab_size
        e.drafting = DrafterPool([*self.drafters.values(), Always()], vocab_size, e.scheduler.pool.empty_store)
        most = e.scheduler.limits.num_rows
        fewest, *others = [n for n in self.grid.num_rows if n <= most] or [most]
        stages: list[Callable[[float], None]] = [self._context, *(partial(self._stage, n) for n in others)]
        stages.insert(0, stages.pop())  # the most rows matter more than how long their texts are
        self._fill(_Rows(1, self._prompt_len))  # the first pass of all touches memory that no other does
        self._stage(fewest, 1 / (1 + len(stages)))
        if not self.hosts:
            raise ConfigError(NO_ROOM)
        for index, stage in enumerate(stages, start=2):
            stage(index / (1 + len(stages)))

    def _stage(self, num_rows: int, until: float) -> None:
        """Measure with so many rows, if that is likely to end in time. until: as in `_measure`."""
        kinds = self._kinds(num_rows)
        if not self.passes or self._fits(num_rows, kinds):
            rows = _Rows(num_rows, self._prompt_len)
            for (_, kind), steps in self._measure(kinds, (rows,), until).items():
                self._keep(kind, num_rows, steps)

    def _context(self, until: float) -> None:
        """Measure one row with a longer text, as long as can be had in a share of the time.

        In turns with a short one: a shared machine drifts by more than some hundred keys cost. So it is how many
        times as long as with the short text, of what that took before.
        """
        token_s = max(self._token_s(), 1e-9)
        length = min(int(CONTEXT_SHARE * self.grid.seconds / token_s), self._longest // 2)
        if length < SHORTEST or self._spent() + CONTEXT_SHARE >= 1:
            return
        long, short = _Rows(1, min(length, LONGEST), again=True), _Rows(1, self._prompt_len)
        kinds = [_Probed(None, 0), _Probed(None, min(self.grid.ks[-1], self._deepest))]
        timed = self._measure(kinds, (long, short), until)
        told = [p for p in self.passes if not p.work.unscored and p.work.kv_tokens]
        known = {int(p.work.tokens): p.seconds for p in reversed(told)}  # the first: several rows came later
        for kind in kinds:
            before = known.get(1 + kind.k)
            steps, beside = timed.get((long, kind), []), timed.get((short, kind), [])
            if before and steps and beside:
                times = median(a.target_s / b.target_s for a, b in zip(steps, beside, strict=False))
                self.passes.append(TimedPass(steps[-1].work, before * times))

    @property
    def _longest(self) -> int:
        """Tokens of prompt and answer that a request may have."""
        return min(self.engine.scheduler.limits.max_len, self.engine.scheduler.capacity)

    @property
    def _prompt_len(self) -> int:
        """Tokens of a prompt: few, so that much of the text is left to measure with."""
        return max(1, min(PROMPT_LEN, self._longest // PROMPT_LEN))

    @property
    def _deepest(self) -> int:
        """The most drafts that a row has room for after its prompt and a step or two."""
        return max(0, self._longest - self._prompt_len - AHEAD)

    def _fits(self, num_rows: int, kinds: Sequence[_Probed]) -> bool:
        """Whether a round of steps with so many rows is likely to end in time, by what a token has cost so far."""
        verified = sum(1 + (kind.k if kind.drafter is None else 0) for kind in kinds)
        tokens = num_rows * (self._prompt_len + verified)
        seconds = len(kinds) * min(p.seconds for p in self.passes) + tokens * self._token_s()
        return self._spent() + seconds / self.grid.seconds < 1

    def _token_s(self) -> float:
        """Return what a token more has cost in the passes of one row."""
        found = [p for p in self.passes if not p.work.unscored][: len(self.grid.ks)]
        one, several = found[0], found[-1]
        return max(several.seconds - one.seconds, 0.0) / max(int(several.work.tokens - one.work.tokens), 1)

    def _spent(self) -> float:
        """Return the share of the time that is gone."""
        return (perf_counter() - self.start) / self.grid.seconds

    def _tell(self) -> None:
        if self.progress:
            self.progress(WHAT, int(100 * min(self._spent(), 1.0)), 100)

    def _kinds(self, num_rows: int) -> list[_Probed]:
        """Return what is timed; drafters whose proposals cost nothing need not be."""
        ks, drafter_ks = (
            sorted({min(k, self._deepest) for k in of}) for of in (self.grid.ks, self.grid.drafter_ks)
        )
        verified = [k for k in ks if num_rows * (1 + k) <= self.grid.most_tokens]
        slow = [(name, d.needs.max_k) for name, d in self.drafters.items() if not d.needs.instant]
        drafting = [_Probed(name, k) for name, most in slow for k in drafter_ks if 0 < k <= most]
        return [*(_Probed(None, k) for k in verified), *drafting]

    def _measure(
        self, kinds: Sequence[_Probed], each: Sequence[_Rows], until: float
    ) -> Mapping[tuple[_Rows, _Probed], list[_Timed]]:
        """Time each kind in turn with each of some rows, plain steps first: so a stall meets one of them once.

        The first round only warms up. A kind for which there is no room is left out.

        until: the share of the time after which no round is begun. With little time the first round counts.
        """
        timed: dict[tuple[_Rows, _Probed], list[_Timed]] = {}
        left = [(rows, kind) for rows in each for kind in kinds]
        if not self._fill(each[0], self.passes):
            return timed
        for rounds in range(1 + self.grid.repeats):
            if rounds and self._spent() > until:
                break
            for rows, kind in tuple(left):
                if kind == kinds[0]:  # the next one finds caches as steps without drafts leave them
                    self._time(_Probed(None, 0), rows)
                step = self._time(kind, rows)
                if step is None:
                    left.remove((rows, kind))
                    continue
                timed.setdefault((rows, kind), []).append(step)
                self._tell()
        return {what: steps[1:] or steps for what, steps in timed.items()}

    def _keep(self, kind: _Probed, num_rows: int, steps: Sequence[_Timed]) -> None:
        if kind.drafter is not None:
            self.drafting[kind.drafter][num_rows, kind.k] = median(s.draft_s for s in steps)
            return
        self.passes.append(TimedPass(steps[-1].work, median(s.target_s for s in steps)))
        self.hosts.append(median(s.host_s for s in steps))

    def _time(self, kind: _Probed, rows: _Rows) -> _Timed | None:
        """Time a step of a kind, with new rows if these come to their ends; None if there is no room for it."""
        for _ in range(2):
            if not self._ready(rows, kind.k) and not self._fill(rows):
                break
            if kind.drafter not in (None, self._following):
                self._step(Told(kind.drafter, 1, verifies=False))  # it catches up on what others' steps brought
            self._following = kind.drafter
            step = self._step(_told(kind))
            if step.ks == (kind.k,) * rows.num and not step.num_prefilled and step.target_s > 0:
                return step
            self.clear()  # rows have ended, or pages ran out as they grew
        return None

    def _ready(self, rows: _Rows, k: int) -> bool:
        """Whether so many rows decode, none more, and are far enough from their ends to draft so much."""
        decoding = self.engine.scheduler.decoding()
        left = min((r.remaining for r in decoding), default=0)
        return rows == self._rows and self._num_open() == len(decoding) == rows.num and left >= k + AHEAD - 1

    def _step(self, told: Told) -> _Timed:
        """Run a step and see what it did and how long that took."""
        e, before = self.engine, self.engine.stats()
        prefill = outlook(e.scheduler, e.drafting, wants_preview=False).prefill
        e.controller = told
        with uninterrupted():
            self.whole = False
            e.step()
            self.whole = True
        gained = e.stats().since(before)
        done = [(r, len(d)) for b, draft in told.seen for r, d in zip(b.rows, draft.rows, strict=True)]
        num_prefilled = sum(r.num_known for r, _ in done if not r.decodes)
        decodes = [(r, k) for r, k in done if r.decodes]
        work = _decoding(decodes)
        if num_prefilled:
            work += prefill
        foreseen = num_prefilled == int(prefill.tokens)
        ks = tuple(r.max_drafts for r, _ in decodes)
        return _Timed(work, gained.target_s, gained.draft_s, gained.host_s, ks, num_prefilled, foreseen)

    def _fill(self, rows: _Rows, passes: list[TimedPass] | None = None) -> bool:
        """Put new rows in place of all, and return whether so many decode; their prefill is added to `passes`.

        They do not if there are pages for fewer, or if the first have ended before the last begin.
        """
        self.clear()
        self._following, self._rows = None, rows
        chunks = -(-rows.num * rows.prompt_len // self.engine.scheduler.limits.prefill_tokens)
        for _ in range(rows.num + chunks):  # a short queue takes one request a step
            self._add(rows)
            step = self._step(Told())
            if passes is not None and step.foreseen and step.target_s > 0:
                passes.append(TimedPass(step.work, step.target_s))
            self._tell()
            if len(self.engine.scheduler.decoding()) >= rows.num:
                return True
            if not step.num_prefilled:  # nor will the next one bring a row more
                break
        return False

    def _add(self, rows: _Rows) -> None:
        """Add requests until there are so many, or as many as the queue takes now."""
        size = self.engine.target.config.vocab_size
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=self._longest - rows.prompt_len)
        while self._num_open() < rows.num:
            number = self._num_open() if rows.again else self._num_added
            ids = tuple((number * 7919 + i * 104729) % size for i in range(rows.prompt_len))
            try:
                self.engine.add(Request(f"calibration-{self._num_added}", ids, params, seed=0))
            except QueueFull:
                return
            self._num_added += 1

    def _num_open(self) -> int:
        return len(self.engine.scheduler.running) + len(self.engine.scheduler.waiting)

    def clear(self) -> None:
        """End all rows, and let the drafters hear of it now: what they keep of them is to be forgotten."""
        for request_id in [r.request.request_id for r in self.engine.scheduler.by_id.values()]:
            self.engine.cancel(request_id)
        with uninterrupted():
            while self.engine.has_work:
                self.engine.step()
            self.engine.step()  # rows that ended by themselves are let go of in the step after

    def result(self) -> Calibration:
        if self.progress:
            self.progress(WHAT, 100, 100)
        target = fit_target(self.passes)
        costs = tuple(fit_drafting(_more_rows(timed, target)) for timed in self.drafting.values())
        cost = MeasuredCost(target, costs)
        return Calibration(cost, tuple(self.drafting), median(self.hosts), tuple(self.passes))


class _Timed(NamedTuple):
    """A step that was timed."""

    work: Work
    target_s: float
    draft_s: float
    host_s: float
    ks: tuple[int, ...]  # of the rows that decoded: drafts that each might have
    num_prefilled: int  # tokens of prompts
    foreseen: bool  # they were as many as there was reason to expect; else `work` is not what was done


def _decoding(rows: Sequence[tuple[BatchRow, int]]) -> Work:
    """Return the work of rows that decode, each with so many drafts verified."""
    lengths = [r.max_len - r.max_drafts - 1 for r, _ in rows]
    pairs = sum(n + k * n + k * (k + 1) // 2 for n, (_, k) in zip(lengths, rows, strict=True))
    return Work(len(rows) + sum(k for _, k in rows), 0, sum(lengths), pairs)


def _more_rows(timed: Mapping[tuple[int, int], float], target: TargetCost) -> Mapping[tuple[int, int], float]:
    """Where there was no time for more rows, suppose that drafting takes longer with them as a pass does."""
    known = {rows for rows, _ in timed}
    if len(known) != 1:
        return timed
    (rows,) = known
    factor = float(target.by_tokens(MANY * rows) / max(float(target.by_tokens(rows)), 1e-9))
    return {**timed, **{(MANY * rows, k): seconds * factor for (_, k), seconds in timed.items()}}
