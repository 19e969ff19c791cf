"""`paceline timeline`: record when the target, the drafter and the host work.

An engine is watched from outside: its decoder, its drafters and its loop are put behind proxies that note when
calls begin and end. An engine that is not watched runs no code of this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from paceline.backend.target import Deferred
from paceline.bench.interleave import cancel_all
from paceline.bench.prompt_file import BUILTIN, PROMPTS_HELP, PROMPTS_METAVAR, read_prompts
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.params import SamplingParams
from paceline.draft.drafter import MAX_K
from paceline.engine.assembly.cli_options import add_target_arguments, engine_config
from paceline.engine.assembly.config import MAX_ROWS
from paceline.serve.terminal.output_files import check_picture

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Mapping, Sequence

    from paceline.backend.seam import PassRequest, PassResult, Pending
    from paceline.bench.interleave import Question
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine

T = TypeVar("T")

TARGET, DRAFT, STEP = "target", "draft", "step"
MAX_STEPS, MAX_SHOWN = 10_000, 100
GROUP_COLOURS = ("tab:blue", "tab:orange")
HOST_COLOUR = "0.45"
LANE_SHARE = 0.7  # height of a bar, as a share of its lane


# The command -------------------------------------------------------------------------------------


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--draft", required=True, metavar="SPEC", help="a drafter with weights of its own, such as eagle3:k=4")
    add("--prompts", default=BUILTIN, metavar=PROMPTS_METAVAR, help=PROMPTS_HELP)
    add("--size", type=int, default=8, metavar="N", help="requests in flight")
    add("--steps", type=int, default=64, metavar="N", help="steps recorded of each loop")
    add("--plot", metavar="FILE.png", help="draw a few steps of both loops")
    add("--shown", type=int, default=6, metavar="N", help="steps drawn")
    add_target_arguments(parser)
    parser.set_defaults(max_len=2048)


def run(args: Namespace) -> int:
    """Record both loops, print a table, draw."""
    from paceline.bench.scenarios.core_sharing import split_cores
    from paceline.serve.terminal.display import say

    _check(args)
    config = split_cores(engine_config(args))
    config = replace(config, limits=replace(config.limits, num_rows=args.size))
    timelines = _record_loops(args, config)
    _print(timelines, args.size)
    if args.plot:
        _draw(args, config, timelines)
        say(args.plot)
    return 0


def _check(args: Namespace) -> None:
    from paceline.bench.session import SPARE_TOKENS

    for name, low, high in (("size", 2, MAX_ROWS), ("steps", 4, MAX_STEPS), ("shown", 1, MAX_SHOWN)):
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"--{name} must be between {low} and {high}, not {getattr(args, name)}")
    check_picture("--plot", args.plot)
    # No answer may end before the last step, even if every draft is accepted.
    max_steps = (args.max_len - SPARE_TOKENS) // (MAX_K + 1) - 1
    if args.steps > max_steps:
        raise ConfigError(
            f"--steps {args.steps}: with --max-len {args.max_len} it is {max_steps} at most; "
            "take fewer, or raise that"
        )


def _record_loops(args: Namespace, config: EngineConfig) -> dict[str, Timeline]:
    """Return timelines of the serial and the overlapped loop, both with separate drafter cores."""
    from paceline.bench.scenarios.core_sharing import OVERLAPPED, SEPARATE, separate_cores

    splits = separate_cores(config)
    params = SamplingParams(temperature=0.0, max_tokens=(MAX_K + 1) * (args.steps + 1), ignore_eos=True)
    questions = splits[OVERLAPPED].pool.choose(read_prompts(args.prompts), args.size, params)
    return {
        name: splits[name].use(args.draft, partial(record, questions=questions, steps=args.steps))
        for name in (SEPARATE, OVERLAPPED)
    }


def _print(timelines: Mapping[str, Timeline], size: int) -> None:
    from paceline.serve.terminal.display import table

    found = {name: summary(timeline.cycles()) for name, timeline in timelines.items()}
    figures = {"step_s": 1e3, "verify_s": 1e3, "draft_s": 1e3, "serial": 1.0, "overlapped": 1.0}
    rows = [[name, *(f"{u * x[figure]:.3f}" for figure, u in figures.items())] for name, x in found.items()]
    columns = ["loop", "step, ms", "V, ms", "t, ms", "step / (V + t)", "step / max(V, t)"]
    table(f"medians, {size} requests in flight; overlapped, half of them in each step", columns, rows)


# Recording ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A call: its kind, start and end (clock, seconds) and thread."""

    kind: str  # TARGET, DRAFT or STEP
    start_s: float
    end_s: float
    thread: int

    @property
    def length_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class PassCycle:
    """The time from the start of one target pass to the start of the next."""

    length_s: float
    verify_s: float  # V, time of the pass
    draft_s: float  # t, drafter time in the cycle

    @property
    def overlapped(self) -> float:
        """Length over max(V, t). It is 1 if the longer side never waited."""
        return self.length_s / max(self.verify_s, self.draft_s)

    @property
    def serial(self) -> float:
        """Length over V + t: 1 if nothing overlapped and the host took no time."""
        return self.length_s / (self.verify_s + self.draft_s)


class Timeline:
    """Spans of an engine's target, drafters and loop, in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def watch(self, engine: Engine) -> None:
        """Record what an engine does from now on. Call it between steps."""
        engine.target.decoder = self._watched(engine.target.decoder, TARGET, launch="launch")
        engine.loop = self._watched(engine.loop, STEP, "step")
        for name, drafter in engine.drafting.drafters.items():
            engine.drafting.drafters[name] = self._watched(drafter, DRAFT, "propose", "commit")

    def _watched(self, inner: T, kind: str, *methods: str, launch: str = "") -> T:
        return cast("T", _CallRecorder(self, inner, kind, methods, launch))

    def record_call(self, kind: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Make a call and record its span."""
        start_s = perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            self.spans.append(Span(kind, start_s, perf_counter(), get_ident()))

    def record_launch(self, kind: str, launch: Callable[[PassRequest], Pending], request: PassRequest) -> Pending:
        """Launch a pass and record its span when its `wait` returns."""
        start_s, pending = perf_counter(), launch(request)

        def wait() -> PassResult:
            result = pending.wait()
            self.spans.append(Span(kind, start_s, perf_counter(), get_ident()))
            return result

        return Deferred(wait)

    def of(self, kind: str) -> list[Span]:
        """Return the spans of one kind in the order of their start."""
        return sorted((span for span in self.spans if span.kind == kind), key=lambda span: span.start_s)

    def cycles(self) -> list[PassCycle]:
        """Return the cycles between the first pass and the last."""
        drafts = self.of(DRAFT)
        return [
            PassCycle(
                after.start_s - now.start_s,
                now.length_s,
                sum(d.length_s for d in drafts if now.start_s <= d.start_s < after.start_s),
            )
            for now, after in pairwise(self.of(TARGET))
        ]

    def host(self) -> list[Span]:
        """Return the host's working times: steps without waiting for a pass or a drafter."""
        passes, drafts = self.of(TARGET), self.of(DRAFT)
        return [piece for step in self.of(STEP) for piece in _without(step, _awaited(step, passes) + drafts)]


class _CallRecorder:
    """Proxy that records calls of some methods, and of one that launches a pass."""

    def __init__(
        self, timeline: Timeline, inner: object, kind: str, methods: tuple[str, ...], launch: str
    ) -> None:
        self._timeline = timeline
        self._inner = inner
        self._kind = kind
        self._methods = methods
        self._launch = launch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == self._launch:
            return partial(self._timeline.record_launch, self._kind, found)
        if name not in self._methods:
            return found
        return partial(self._timeline.record_call, self._kind, found)


def _awaited(step: Span, passes: Sequence[Span]) -> list[Span]:
    """Return the passes that a step awaits: its own and earlier ones of another thread."""
    return [p for p in passes if p.thread == step.thread or p.start_s < step.start_s]


def _without(step: Span, others: Sequence[Span]) -> list[Span]:
    """Return the pieces of a span that no other span covers."""
    pieces, at_s = [], step.start_s
    for other in sorted(others, key=lambda span: span.start_s):
        if other.end_s <= at_s or other.start_s >= step.end_s:
            continue
        if other.start_s > at_s:
            pieces.append(replace(step, start_s=at_s, end_s=other.start_s))
        at_s = other.end_s
    return pieces + ([replace(step, start_s=at_s)] if at_s < step.end_s else [])


def record(engine: Engine, questions: Sequence[Question], steps: int) -> Timeline:
    """Return the timeline of `steps` steps in which every request decodes.

    Raises `ConfigError` if a request ends before, and `PacelineError` if a drafter failed.
    """
    timeline, decoding = Timeline(), set[str]()
    for question in questions:
        engine.add(question.request)
    while len(decoding) < len(questions):
        decoding |= _step(engine)
    timeline.watch(engine)
    for _ in range(steps):
        _step(engine)
    cancel_all(engine, [question.request.request_id for question in questions])
    if engine.stats().drafter_failures:
        raise PacelineError("the drafter failed; the log says why")
    end_s = timeline.of(STEP)[steps - 1].end_s
    timeline.spans = [span for span in timeline.spans if span.start_s < end_s]
    return timeline


def _step(engine: Engine) -> set[str]:
    """Take a step; return the ids of requests that got tokens."""
    outcomes = engine.step()
    if any(o.finish_reason is not None for o in outcomes):
        raise ConfigError("an answer ended before all steps were seen; take fewer --steps, or raise --max-len")
    return {o.request_id for o in outcomes}


def summary(cycles: Sequence[PassCycle]) -> dict[str, float]:
    """Return medians over cycles: `step_s`, `verify_s`, `draft_s`, `overlapped`, `serial`; see `PassCycle`.

    Raises `ConfigError` if there are none.
    """
    if not cycles:
        raise ConfigError("no two passes were seen; take more --steps")
    return {
        "step_s": median(cycle.length_s for cycle in cycles),
        "verify_s": median(cycle.verify_s for cycle in cycles),
        "draft_s": median(cycle.draft_s for cycle in cycles),
        "overlapped": median(cycle.overlapped for cycle in cycles),
        "serial": median(cycle.serial for cycle in cycles),
    }


# The picture -------------------------------------------------------------------------------------


def _draw(args: Namespace, config: EngineConfig, timelines: Mapping[str, Timeline]) -> None:
    """Draw `--shown` cycles from the middle of each timeline, all on the same time scale."""
    from paceline.bench.pictures import DPI, new_figure
    from paceline.bench.scenarios.core_sharing import OVERLAPPED

    target, drafter = config.placement.target, config.placement.draft
    lanes = (f"target, {target}", f"drafter, {drafter}", "host")
    figure = new_figure(10, 1.9 * len(timelines))
    all_axes = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
    ranges = {title: _middle(timeline, args.shown) for title, timeline in timelines.items()}
    length_s = max(end_s - start_s for start_s, end_s in ranges.values())
    for axes, (title, timeline) in zip(all_axes, timelines.items(), strict=True):
        num_groups = 2 if title == OVERLAPPED else 1
        _draw_lanes(axes, timeline, GROUP_COLOURS[:num_groups], ranges[title][0])
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlim(0, 1e3 * length_s)
    all_axes[-1].set_xlabel("ms")
    figure.savefig(Path(args.plot), dpi=DPI)


def _middle(timeline: Timeline, num_cycles: int) -> tuple[float, float]:
    """Return start and end of the `num_cycles` cycles in the middle, seconds."""
    starts = [span.start_s for span in timeline.of(TARGET)]
    first = max(0, (len(starts) - 1 - num_cycles) // 2)
    return starts[first], starts[min(first + num_cycles, len(starts) - 1)]


def _draw_lanes(axes: Any, timeline: Timeline, colours: Sequence[str], zero_s: float) -> None:
    """Draw the three lanes, a colour per group of rows.

    Drafting beside or after a pass is for the group whose pass comes next.
    """
    passes = timeline.of(TARGET)
    for index, span in enumerate(passes):
        _draw_bar(axes, 0, span, zero_s, colours[index % len(colours)])
    for span in timeline.of(DRAFT):
        index = sum(p.start_s <= span.start_s for p in passes)
        _draw_bar(axes, 1, span, zero_s, colours[index % len(colours)])
    pieces = [(1e3 * (span.start_s - zero_s), 1e3 * span.length_s) for span in timeline.host()]
    axes.broken_barh(pieces, (2 - LANE_SHARE / 2, LANE_SHARE), color=HOST_COLOUR)


def _draw_bar(axes: Any, lane: int, span: Span, zero_s: float, colour: str) -> None:
    axes.barh(lane, 1e3 * span.length_s, LANE_SHARE, 1e3 * (span.start_s - zero_s), color=colour)
