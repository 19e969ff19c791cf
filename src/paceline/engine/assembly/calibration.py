"""Calibration: measure step costs on the engine itself, with requests whose text is dropped.

At each number of rows a few steps are timed: without drafts, with drafts that are free and useless (the cost of
verification), and with each real drafter, whose drafts are not verified (the cost of drafting). What matters most
is measured first. When time is up the rest is left out: its costs are interpolated or extrapolated, and real steps
correct them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.control.cost import MeasuredCost, TargetCost, TimedPass, fit_drafting, fit_target
from paceline.control.expert_cost import mean_touched
from paceline.control.fixed import FixedK
from paceline.control.policy import Work
from paceline.core.errors import ConfigError, QueueFull
from paceline.core.nouns import NO_DRAFT, Draft, RowDraft
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.core.system import uninterrupted
from paceline.draft.drafter import MAX_K, Needs
from paceline.draft.keeps_nothing import KeepsNothing
from paceline.engine.drafter_pool import DrafterPool
from paceline.engine.step import SerialLoop
from paceline.engine.step_view import step_view

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.control.protocols import StepTimes
    from paceline.core.nouns import Batch, BatchRow, Plan, Verdict
    from paceline.engine.engine import Engine

    Progress = Callable[[str, int, int], None]  # (what, done, total)

METHOD = 7  # version of the method; profiles of another version are measured anew
WHAT = "measuring what steps cost"
PROMPT_LEN = 4
SHORTEST, LONGEST = 64, 1024  # bounds of the long text, in tokens, whose passes tell the price of a key
CONTEXT_SHARE = 0.1  # share of the time budget for the prefill of the long text
ENOUGH = 4096  # tokens of KV with which everything can be measured
AHEAD = 4  # tokens that a row gains before a timed step: its first, two in the step before, one in the step itself
MANY = 32  # rows that costs are extrapolated to where they were measured for one number of rows
SAME, VARIED = "always", "varied"  # names of the free drafters: with equal drafts, with drafts that vary
CONTEXTS = 64  # long texts at once on a device with buckets: one text would leave the device idle
NO_ROOM = (
    "there is no room to measure what a step costs: raise --max-len or --kv-tokens, or give a --profile that "
    "was measured with more"
)


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers of rows and drafts to measure, and how often."""

    num_rows: tuple[int, ...] = (1, 8, 32)
    ks: tuple[int, ...] = (0, 1, 3, 5, 7)  # drafts verified for each row
    drafter_ks: tuple[int, ...] = (1, 8)  # drafts made by each drafter
    most_tokens: int = 128  # most tokens of a measured pass; a backend with buckets is measured at its buckets
    repeats: int = 7
    seconds: float = 2.5  # time budget: no measurement is begun after it


QUICK = Grid()
# A device reads its weights once for hundreds of tokens, so more rows are measured there, with more seconds.
DEVICE_ROWS, DEVICE_SECONDS = (128, 256), 8.0
THOROUGH = Grid((1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 3, 4, 5, 6, 8), (1, 2, 3, 4, 6, 8), 1024, 10, 120.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of a calibration."""

    cost: MeasuredCost
    names: tuple[str, ...]  # of the drafters, in the order of `cost.drafters`
    host_s: float  # host time of a step, median
    passes: tuple[TimedPass, ...]


def room(engine: Engine) -> list[int]:
    """Return the engine's limits that restrict what can be measured.

    The limits are numbers of tokens: of one text, of all texts, of the prompts in a step, of the prompts that
    wait. Each is cut at the value from which on it restricts nothing.
    """
    limits, capacity = engine.scheduler.limits, engine.scheduler.capacity
    on_device = bool(engine.target.decoder.capabilities.token_buckets)
    at_once = (DEVICE_ROWS[-1] if on_device else MANY) * PROMPT_LEN
    longest = min(limits.max_len, capacity, 2 * LONGEST)
    return [
        longest,
        min(capacity, 2 * LONGEST * CONTEXTS if on_device else ENOUGH),
        min(limits.prefill_tokens, at_once),
        min(limits.max_queued_tokens, at_once),
    ]


def calibrate(engine: Engine, grid: Grid = QUICK, progress: Progress | None = None) -> Calibration:
    """Time steps of an idle engine, and leave its counters and caches as they were.

    Kinds of steps that the limits have no room for are left out. Raises `ConfigError` if none is left.
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


class _StepKind(NamedTuple):
    """A kind of step that is timed several times."""

    drafter: str | None  # its drafts are made and not verified; None: free drafts, which are verified
    k: int
    varied: bool = False  # the free drafts are not all one token


class _Rows(NamedTuple):
    """Requests to measure with."""

    num: int
    prompt_len: int  # tokens of each prompt
    again: bool = False  # True: the same prompts each time, so that the prefix cache has them


def _script(kind: _StepKind) -> ScriptedK:
    if kind.drafter is not None:
        return ScriptedK(kind.drafter, kind.k, verifies=False)
    return ScriptedK(VARIED if kind.varied else SAME, kind.k) if kind.k else ScriptedK()


class _Calibrator:
    def __init__(self, engine: Engine, grid: Grid, progress: Progress | None) -> None:
        self.buckets = engine.target.decoder.capabilities.token_buckets
        if self.buckets:
            most = engine.scheduler.limits.num_rows
            rows = sorted({*grid.num_rows, *(min(n, most) for n in DEVICE_ROWS)})
            grid = replace(grid, num_rows=tuple(rows), seconds=max(grid.seconds, DEVICE_SECONDS))
        self.engine, self.grid, self.progress = engine, grid, progress
        self.start = perf_counter()
        self.whole = True  # False: a step raised and left rows half-way, so waiting for an empty engine never ends
        self.drafters = dict(engine.drafting.drafters)
        self.passes: list[TimedPass] = []
        self.drafting: dict[str, dict[tuple[int, int], float]] = {name: {} for name in self.drafters}
        self.hosts: list[float] = []
        self.mixes = engine.target.config.experts is not None
        self.touched: list[tuple[float, ...]] = []  # experts that passes over varied tokens touched
        self._num_added = 0
        self._rows: _Rows | None = None  # the rows that were added last
        self._following: str | None = None  # the drafter that has caught up with the rows

    def run(self) -> None:
        e, vocab_size = self.engine, self.engine.target.config.vocab_size
        drafters = [*self.drafters.values(), AlwaysDrafter(), AlwaysDrafter(VARIED, vocab_size)]
        e.drafting = DrafterPool(drafters, vocab_size, e.scheduler.pool.empty_store)
        max_rows = e.scheduler.limits.num_rows
        fewest, *others = [n for n in self.grid.num_rows if n <= max_rows] or [max_rows]
        stages: list[Callable[[float], None]] = [self._context, *(partial(self._stage, n) for n in others)]
        stages.insert(0, stages.pop())  # many rows matter more than long texts
        self._fill(_Rows(1, self._prompt_len))  # the very first pass pays for memory that no later one does
        self._stage(fewest, 1 / (1 + len(stages)))
        if not self.hosts:
            raise ConfigError(NO_ROOM)
        for index, stage in enumerate(stages, start=2):
            stage(index / (1 + len(stages)))

    def _stage(self, num_rows: int, until: float) -> None:
        """Measure with `num_rows`, if that is likely to end in time. until: as in `_measure`."""
        kinds = self._kinds(num_rows)
        if not self.passes or self._fits(num_rows, kinds):
            rows = _Rows(num_rows, self._prompt_len)
            for (_, kind), steps in self._measure(kinds, (rows,), until).items():
                self._keep(kind, num_rows, steps)

    def _context(self, until: float) -> None:
        """Measure with long texts, for at most a share of the time.

        One row has a long text; on a device that one row would leave idle, many rows have one.
        Steps with long texts alternate with steps of short texts, because a shared machine drifts by more than
        some hundred keys cost. The ratio of the two is applied to the time that short texts took before.
        """
        token_s = max(self._token_s(), 1e-9)
        limits, capacity = self.engine.scheduler.limits, self.engine.scheduler.capacity
        tokens = min(int(CONTEXT_SHARE * self.grid.seconds / token_s), capacity // 2)
        num = max(1, min(CONTEXTS, limits.num_rows, tokens // SHORTEST)) if self.buckets else 1
        length = min(tokens // num, self._longest // 2)
        if length < SHORTEST or self._spent() + CONTEXT_SHARE >= 1:
            return
        long, short = _Rows(num, min(length, LONGEST), again=True), _Rows(num, self._prompt_len)
        kinds = [_StepKind(None, 0), _StepKind(None, min(self.grid.ks[-1], self._deepest), self.mixes)]
        timed = self._measure(kinds, (long, short), until)
        decodes = [p for p in self.passes if not p.work.unscored and p.work.kv_tokens]
        known = {int(p.work.tokens): p.seconds for p in reversed(decodes)}  # of each size the one with fewest rows
        for kind in kinds:
            steps, beside = timed.get((long, kind), []), timed.get((short, kind), [])
            if steps and beside:
                before = known.get(num * (1 + kind.k)) or median(b.target_s for b in beside)
                times = median(a.target_s / b.target_s for a, b in zip(steps, beside, strict=False))
                self.passes.append(TimedPass(steps[-1].work, before * times, _num_touched(steps)))

    @property
    def _longest(self) -> int:
        """Upper bound of the tokens of prompt and answer of a request."""
        return min(self.engine.scheduler.limits.max_len, self.engine.scheduler.capacity)

    @property
    def _prompt_len(self) -> int:
        """Return the tokens of a prompt: few, so the rest is for measuring."""
        return max(1, min(PROMPT_LEN, self._longest // PROMPT_LEN))

    @property
    def _deepest(self) -> int:
        """Upper bound of the drafts that fit after a prompt and the steps before."""
        return max(0, self._longest - self._prompt_len - AHEAD)

    def _fits(self, num_rows: int, kinds: Sequence[_StepKind]) -> bool:
        """True if each kind's step is likely to end in time, judged by token cost."""
        verified = sum(1 + (kind.k if kind.drafter is None else 0) for kind in kinds)
        tokens = num_rows * (self._prompt_len + verified)
        seconds = len(kinds) * min(p.seconds for p in self.passes) + tokens * self._token_s()
        return self._spent() + seconds / self.grid.seconds < 1

    def _token_s(self) -> float:
        """Return the cost of a further token in the passes of one row."""
        found = [p for p in self.passes if not p.work.unscored][: len(self.grid.ks)]
        one, several = found[0], found[-1]
        return max(several.seconds - one.seconds, 0.0) / max(int(several.work.tokens - one.work.tokens), 1)

    def _spent(self) -> float:
        """Return the share of the time budget that is gone."""
        return (perf_counter() - self.start) / self.grid.seconds

    def _show(self) -> None:
        if self.progress:
            self.progress(WHAT, int(100 * min(self._spent(), 1.0)), 100)

    def _kinds(self, num_rows: int) -> list[_StepKind]:
        """Return the kinds of steps to time, without lookup drafters: they cost next to nothing.

        A backend with buckets is timed at every bucket that these rows can fill: it pads passes of other sizes.
        """
        ks = sorted({min(k, self._deepest) for k in self.grid.ks})
        verified = [k for k in ks if num_rows * (1 + k) <= self.grid.most_tokens]
        if self.buckets:
            filling = {bucket // num_rows - 1 for bucket in self.buckets if bucket >= num_rows}
            verified = sorted({0, *(k for k in filling if k <= min(MAX_K, self._deepest))})
        slow = [(name, d.needs.max_k) for name, d in self.drafters.items() if not d.needs.instant]
        deepest = ((name, min(max_k, self._deepest)) for name, max_k in slow)
        depths = {name: {min(k, most) for k in self.grid.drafter_ks} for name, most in deepest}
        drafting = [_StepKind(name, k) for name, each in depths.items() for k in sorted(each) if k]
        free = [_StepKind(None, k, self.mixes and k > 0) for k in verified]
        if self.mixes and verified[-1:] > [0]:  # equal drafts touch fewer experts; the difference is their price
            free.append(_StepKind(None, verified[-1]))
        return [*free, *drafting]

    def _measure(
        self, kinds: Sequence[_StepKind], each: Sequence[_Rows], until: float
    ) -> Mapping[tuple[_Rows, _StepKind], list[_Timed]]:
        """Time each kind with each number of rows, repeat by repeat.

        A stall then hits each kind at most once. The first repeat only warms up, unless there is no time for a
        second. A kind for which there is no room is left out. until: share of the time budget after which no
        repeat is begun.
        """
        timed: dict[tuple[_Rows, _StepKind], list[_Timed]] = {}
        left = [(rows, kind) for rows in each for kind in kinds]
        if not self._fill(each[0], self.passes):
            return timed
        for repeat in range(1 + self.grid.repeats):
            if repeat and self._spent() > until:
                break
            for rows, kind in tuple(left):
                if kind == kinds[0]:  # untimed: it leaves the caches as steps without drafts do
                    self._time(_StepKind(None, 0), rows)
                step = self._time(kind, rows)
                if step is None:
                    left.remove((rows, kind))
                    continue
                timed.setdefault((rows, kind), []).append(step)
                self._show()
        return {what: steps[1:] or steps for what, steps in timed.items()}

    def _keep(self, kind: _StepKind, num_rows: int, steps: Sequence[_Timed]) -> None:
        if kind.drafter is not None:
            self.drafting[kind.drafter][num_rows, kind.k] = median(s.draft_s for s in steps)
            return
        self.passes.append(TimedPass(steps[-1].work, median(s.target_s for s in steps), _num_touched(steps)))
        if kind.varied or not kind.k:
            self.touched += [s.touched for s in steps]
        self.hosts.append(median(s.host_s for s in steps))

    def _time(self, kind: _StepKind, rows: _Rows) -> _Timed | None:
        """Time a step of a kind; None without room. Replace rows about to end first."""
        for _ in range(2):
            if not self._ready(rows, kind.k) and not self._fill(rows):
                break
            if kind.drafter not in (None, self._following):
                self._step(ScriptedK(kind.drafter, 1, verifies=False))  # untimed: the drafter catches up
            self._following = kind.drafter
            step = self._step(_script(kind))
            if step.ks == (kind.k,) * rows.num and not step.num_prefilled and step.target_s > 0:
                return step
            self.clear()  # rows have ended, or pages ran out as they grew
        return None

    def _ready(self, rows: _Rows, k: int) -> bool:
        """True if exactly these rows decode, each far enough from its end for k drafts."""
        decoding = self.engine.scheduler.decoding()
        left = min((r.remaining for r in decoding), default=0)
        return rows == self._rows and self._num_open() == len(decoding) == rows.num and left >= k + AHEAD - 1

    def _step(self, script: ScriptedK) -> _Timed:
        """Run a step with a controller; return what it did and how long that took."""
        e, before = self.engine, self.engine.stats()
        prefill = step_view(e.scheduler, e.drafting).prefill
        e.controller = script
        with uninterrupted():
            self.whole = False
            e.step()
            self.whole = True
        gained = e.stats().since(before)
        done = [(r, len(d)) for b, draft, _ in script.seen for r, d in zip(b.rows, draft.rows, strict=True)]
        num_prefilled = sum(r.num_known for r, _ in done if not r.decodes)
        decodes = [(r, k) for r, k in done if r.decodes]
        work = _decoding(decodes)
        if num_prefilled:
            work += prefill
        foreseen = num_prefilled == int(prefill.tokens)
        ks = tuple(r.max_drafts for r, _ in decodes)
        touched = script.seen[-1][2] if script.seen else ()
        host_s = max(gained.host_s, 0.0)  # negative where a device drafts while the host still launches
        return _Timed(work, gained.target_s, gained.draft_s, host_s, ks, num_prefilled, foreseen, touched)

    def _fill(self, rows: _Rows, passes: list[TimedPass] | None = None) -> bool:
        """Replace all rows by new ones; return True if all of them decode.

        Not all do if pages are too few, or if the first rows end before the last begin. Adds prefills to `passes`.
        """
        self.clear()
        self._following, self._rows = None, rows
        chunks = -(-rows.num * rows.prompt_len // self.engine.scheduler.limits.prefill_tokens)
        for _ in range(rows.num + chunks):  # a short queue takes one request a step
            self._add(rows)
            step = self._step(ScriptedK())
            if passes is not None and step.foreseen and step.target_s > 0:
                passes.append(TimedPass(step.work, step.target_s, _num_touched([step])))
                self.touched.append(step.touched)
            self._show()
            if len(self.engine.scheduler.decoding()) >= rows.num:
                return True
            if not step.num_prefilled:  # no row began in this step, so none will in the next
                break
        return False

    def _add(self, rows: _Rows) -> None:
        """Add requests up to `rows.num`, or as many as the queue takes now."""
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
        """End all rows, and run steps until the drafters have released them too."""
        for request_id in [r.request.request_id for r in self.engine.scheduler.requests.values()]:
            self.engine.cancel(request_id)
        with uninterrupted():
            while self.engine.has_work:
                self.engine.step()
            self.engine.step()  # rows that ended by themselves are released in the step after

    def result(self) -> Calibration:
        if self.progress:
            self.progress(WHAT, 100, 100)
        touched = mean_touched(self.touched) if any(self.touched) else None
        target = fit_target(self.passes, self.buckets, touched)
        costs = tuple(fit_drafting(_more_rows(timed, target)) for timed in self.drafting.values())
        cost = MeasuredCost(target, costs)
        return Calibration(cost, tuple(self.drafting), median(self.hosts), tuple(self.passes))


class _Timed(NamedTuple):
    """Work and times of a step."""

    work: Work
    target_s: float
    draft_s: float
    host_s: float
    ks: tuple[int, ...]  # [rows that decoded] drafts each was allowed
    num_prefilled: int  # prompt tokens
    foreseen: bool  # the prefill was as expected; if not, `work` is not what the pass did
    touched: tuple[float, ...] = ()  # as `StepTimes.touched`


def _num_touched(steps: Sequence[_Timed]) -> float:
    """Return the median number of distinct experts that steps touched."""
    return median(s.touched[0] if s.touched else 0.0 for s in steps)


def _decoding(rows: Sequence[tuple[BatchRow, int]]) -> Work:
    """Return the work of rows that decode. rows: with the drafts verified for each."""
    lengths = [r.max_len - r.max_drafts - 1 for r, _ in rows]
    pairs = sum(n + k * n + k * (k + 1) // 2 for n, (_, k) in zip(lengths, rows, strict=True))
    return Work(len(rows) + sum(k for _, k in rows), 0, sum(lengths), pairs)


def _more_rows(timed: Mapping[tuple[int, int], float], target: TargetCost) -> Mapping[tuple[int, int], float]:
    """Extrapolate drafting from one number of rows to `MANY`: it grows as target passes do."""
    known = {rows for rows, _ in timed}
    if len(known) != 1:
        return timed
    (rows,) = known
    factor = float(target.by_tokens(MANY * rows) / max(float(target.by_tokens(rows)), 1e-9))
    return {**timed, **{(MANY * rows, k): seconds * factor for (_, k), seconds in timed.items()}}


# Stubs that make an engine take the steps to be timed --------------------------------------------


class AlwaysDrafter(KeepsNothing):
    """A free drafter that proposes as often as planned: token 0, or tokens that vary."""

    name = SAME
    needs = Needs()

    def __init__(self, name: str = SAME, vocab_size: int = 1) -> None:
        self.name = name
        self._vocab_size = vocab_size
        self._num_proposed = 0

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Propose a token for each planned draft."""
        return Draft(tuple(self._drafts(r.max_drafts) if r.max_drafts else NO_DRAFT for r in batch.rows))

    def _drafts(self, count: int) -> RowDraft:
        first, self._num_proposed = self._num_proposed, self._num_proposed + count
        ids = tuple(i * 7919 % self._vocab_size for i in range(first, first + count))
        return RowDraft(ids, self.name)

    def report(self) -> Mapping[str, Any]:
        """Return its name."""
        return {"drafter": self.name}


@dataclass(frozen=True)
class ScriptedK(FixedK):
    """A controller with a constant plan. Records the steps, as pages may not allow it."""

    verifies: bool = True  # False: drafts are dropped, as far as the law allows, so that the pass is the cheapest
    # One entry for each step with rows: batch, verified drafts, and experts touched.
    seen: list[tuple[Batch, Draft, tuple[float, ...]]] = field(default_factory=list)

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Keep everything or nothing."""
        return draft if self.verifies else Draft((NO_DRAFT,) * len(batch.rows))

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> tuple[()]:
        """Record the step."""
        self.seen.append((batch, draft, times.touched))
        return ()
