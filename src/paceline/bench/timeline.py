"""When the target and the drafters worked, and when the host did: what a few steps look like by the clock.

An engine is watched from outside: what runs passes, the drafters and the loop are put behind proxies that note
when calls begin and end. An engine that is not watched knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from paceline.backend.pending import Deferred
from paceline.core.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backend.seam import PassRequest, PassResult, Pending
    from paceline.bench.run import Question
    from paceline.engine.engine import Engine

T = TypeVar("T")

TARGET, DRAFT, STEP = "target", "draft", "step"


@dataclass(frozen=True, slots=True)
class Span:
    """A call: what of, from when to when by the clock, and by which thread."""

    what: str
    start_s: float
    end_s: float
    thread: int

    @property
    def length_s(self) -> float:
        """Seconds it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Turn:
    """From when a pass of the target began until the next one did."""

    length_s: float
    verify_s: float  # V, of the pass
    draft_s: float  # t, that drafters worked meanwhile

    @property
    def overlapped(self) -> float:
        """Its length over max(V, t): 1 if the longer side never waited."""
        return self.length_s / max(self.verify_s, self.draft_s)

    @property
    def serial(self) -> float:
        """Its length over V + t: 1 if one side always waited for the other and the host took no time."""
        return self.length_s / (self.verify_s + self.draft_s)


class Timeline:
    """What an engine's sides did, in the order in which it ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def watch(self, engine: Engine) -> None:
        """Note from now on what an engine does. Call it between steps."""
        engine.target.decoder = self._watched(engine.target.decoder, TARGET, begins="launch")
        engine.loop = self._watched(engine.loop, STEP, "step")
        for name, drafter in engine.drafting.drafters.items():
            engine.drafting.drafters[name] = self._watched(drafter, DRAFT, "propose", "commit")

    def _watched(self, inner: T, what: str, *methods: str, begins: str = "") -> T:
        return cast("T", _WatchedDrafter(self, inner, what, methods, begins))

    def note(self, what: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Make a call and note when."""
        start_s = perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            self.spans.append(Span(what, start_s, perf_counter(), get_ident()))

    def note_begun(self, what: str, launch: Callable[[PassRequest], Pending], request: PassRequest) -> Pending:
        """Launch a pass; note from when to when it took, once it is waited for."""
        start_s, pending = perf_counter(), launch(request)

        def noted() -> PassResult:
            found = pending.wait()
            self.spans.append(Span(what, start_s, perf_counter(), get_ident()))
            return found

        return Deferred(noted)

    def of(self, what: str) -> list[Span]:
        """Return the spans of one side, in the order in which they began."""
        return sorted((span for span in self.spans if span.what == what), key=lambda span: span.start_s)

    def turns(self) -> list[Turn]:
        """Return the turns between the first pass and the last."""
        passes, drafts = self.of(TARGET), self.of(DRAFT)
        return [
            Turn(
                after.start_s - now.start_s,
                now.length_s,
                sum(d.length_s for d in drafts if now.start_s <= d.start_s < after.start_s),
            )
            for now, after in pairwise(passes)
        ]

    def host(self) -> list[Span]:
        """Return when the engine's own thread worked: in steps, except where it waited for a pass or a drafter."""
        passes, drafts = self.of(TARGET), self.of(DRAFT)
        return [piece for step in self.of(STEP) for piece in _without(step, _waits(step, passes) + drafts)]


class _WatchedDrafter:
    """An object some of whose methods are noted, and what one that it may have begins; all else is its own."""

    def __init__(
        self, timeline: Timeline, inner: object, what: str, methods: tuple[str, ...], begins: str
    ) -> None:
        self._timeline, self._inner, self._what, self._methods = timeline, inner, what, methods
        self._begins = begins

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == self._begins:
            return partial(self._timeline.note_begun, self._what, found)
        if name not in self._methods:
            return found
        return partial(self._timeline.note, self._what, found)


def _waits(step: Span, passes: Sequence[Span]) -> list[Span]:
    """Return the passes that a step waits for: those it makes itself, and those of another thread from before it.

    The rest of a pass that the step has begun elsewhere is the next step's to wait for.
    """
    return [p for p in passes if p.thread == step.thread or p.start_s < step.start_s]


def _without(step: Span, others: Sequence[Span]) -> list[Span]:
    """Return what is left of a span without others."""
    pieces, at_s = [], step.start_s
    for other in sorted(others, key=lambda span: span.start_s):
        if other.end_s <= at_s or other.start_s >= step.end_s:
            continue
        if other.start_s > at_s:
            pieces.append(replace(step, start_s=at_s, end_s=other.start_s))
        at_s = other.end_s
    return pieces + ([replace(step, start_s=at_s)] if at_s < step.end_s else [])


def record(engine: Engine, asked: Sequence[Question], steps: int) -> Timeline:
    """Return what so many steps look like in which all requests decode: none is at its prompt, none has ended.

    Raises `ConfigError` if they end too soon, and `PacelineError` if a drafter failed.
    """
    timeline, begun = Timeline(), set[str]()
    for question in asked:
        engine.add(question.request)
    while len(begun) < len(asked):
        begun |= _step(engine)
    timeline.watch(engine)
    for _ in range(steps):
        _step(engine)
    for question in asked:
        engine.cancel(question.request.request_id)
    while engine.has_work:
        engine.step()
    if engine.stats().drafter_failures:
        raise PacelineError("the drafter failed; the log says why")
    end_s = timeline.of(STEP)[steps - 1].end_s
    timeline.spans = [span for span in timeline.spans if span.start_s < end_s]
    return timeline


def _step(engine: Engine) -> set[str]:
    """Take a step; return the requests that got tokens."""
    outcomes = engine.step()
    if any(o.finish_reason is not None for o in outcomes):
        raise ConfigError("an answer ended before all steps were seen; take fewer --steps, or raise --max-len")
    return {o.request_id for o in outcomes}


def summary(turns: Sequence[Turn]) -> dict[str, float]:
    """Return medians over turns: `step_s`, `verify_s`, `draft_s`, `overlapped` and `serial`, see `Turn`.

    Raises `ConfigError` if there are none.
    """
    if not turns:
        raise ConfigError("no two passes were seen; take more --steps")
    return {
        "step_s": median(turn.length_s for turn in turns),
        "verify_s": median(turn.verify_s for turn in turns),
        "draft_s": median(turn.draft_s for turn in turns),
        "overlapped": median(turn.overlapped for turn in turns),
        "serial": median(turn.serial for turn in turns),
    }
