"""`paceline explain`: replay a trace of the controller: what it knew, chose and got."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.params import TYPICAL

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from paceline.control.controller import ClosedLoop
    from paceline.control.cost import Curve
    from paceline.control.trace_files import Step

MAX_ROWS_SHOWN = 20


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("trace", metavar="FILE", help="written by --draft auto --trace FILE")
    parser.add_argument(
        "--step", type=int, metavar="N", help="show one step, counted from 1, with all that was known"
    )


def run(args: Namespace) -> int:
    """Replay a trace; print a summary, or one step."""
    if args.step is None:
        _summary(args.trace)
    else:
        _one_step(args.trace, args.step)
    return 0


def _summary(path: str) -> None:
    from paceline.control.trace_files import read_head, replay
    from paceline.serve.terminal.display import progress, say, table

    head = read_head(Path(path))
    say(f"started from {head.begun_with or 'nothing learnt before'}")
    steps: list[Step] = []
    stairs: list[Curve | None] = []

    def on_plan(loop: ClosedLoop, _: int) -> None:
        stairs[:] = [_staircase(loop)]

    with progress("replaying") as update:
        for step in replay(Path(path), on_plan):
            steps.append(step)
            update(len(steps), 0)
    if not steps:
        raise ConfigError(f"{path} has no steps")
    ks = Counter[int](k for step in steps for k in step.outcomes.num_verified.tolist())
    kept = Counter[int](k for step in steps for k in step.outcomes.num_accepted.tolist())
    rows = [(str(k), str(ks[k]), str(kept[k])) for k in range(max(ks, default=0) + 1)]
    table(f"{len(steps)} steps", ("k", "rows that verified k", "rows that kept k"), rows)
    chosen = [s for s in steps if _same(s)]  # those replayed as they were: the time of another choice is unknown
    predicted = [(s.now.seconds, _seconds(s)) for s in chosen if s.now.seconds and len(s.view.rows)]
    if predicted:
        errors = [abs(p / m - 1) for p, m in predicted]
        p90 = sorted(errors)[len(errors) * 9 // 10]
        say(f"predicted step time is off by {median(errors):.1%} (median), {p90:.1%} (p90)")
    dropped, worth = sum(int(s.dropped.sum()) for s in steps), sum(s.dropped_tokens for s in steps)
    say(f"trimmed: {dropped} drafts were made and not verified; they were worth {worth:.1f} tokens, as believed")
    _say_retired(head.names, steps)
    tokens = sum(float(s.outcomes.num_accepted.sum()) + len(s.outcomes.rows) for s in steps)
    hoped = sum(s.now.tokens for s in steps)
    say(f"tokens: {tokens:.0f} committed by decoding, {hoped:.0f} expected")
    plain = sum(s.now.speedup * _seconds(s) for s in steps) / sum(_seconds(s) for s in steps)
    say(f"estimated speed-up against no drafts: {plain:.2f}x")
    found = [s.overlap for s in steps if s.overlap is not None]
    if found:
        win, done = sum(t.gain > 1 for t in found), sum(s.overlapped for s in steps)
        say(f"overlap: would have been faster in {win} of {len(found)} steps; {done} were overlapped")
    if stairs[0] is not None:
        _say_filled(stairs[0], steps)
    if head.law == TYPICAL:
        say(
            "law typical: kept drafts include changed tokens; usage.speculation.changed_tokens of an answer counts"
        )
    say(f"the replay chose the same in {len(chosen)} of {len(steps)} steps")


def _say_filled(curve: Curve, steps: Sequence[Step]) -> None:
    """Say how full the passes were that were padded to a bucket."""
    from paceline.serve.terminal.display import say

    padded = [(n, bucket) for n in map(_pass_tokens, steps) if (bucket := curve.bucket(n))]
    filled = sum(n for n, _ in padded) / max(sum(bucket for _, bucket in padded), 1)
    say(f"{len(padded)} of {len(steps)} passes were padded to a bucket; tokens fill {filled:.0%} of these buckets")


def _staircase(loop: ClosedLoop) -> Curve | None:
    """Return the seconds of passes by tokens, if they rise in steps."""
    curve = loop.cost.measured.target.by_tokens if loop.cost else None
    return curve if curve is not None and curve.stepped else None


def _pass_tokens(step: Step) -> int:
    """Return the tokens of a step's pass: newest tokens, verified drafts and prefill."""
    o = step.outcomes
    return len(o.rows) + int(o.num_verified.sum()) + int(step.view.prefill.tokens)


def bucket_line(curve: Curve, tokens: int) -> str:
    """Return what a pass costs by its bucket, and what more tokens would add."""
    bucket = curve.bucket(tokens)
    if bucket is None:
        return f"the pass has {tokens} tokens, more than the largest bucket, {int(curve.counts[-1])}"
    following, ms = curve.bucket(bucket + 1), 1e3 * float(curve(bucket))
    line = f"the pass has {tokens} tokens and costs what its bucket of {bucket} does, {ms:.2f} ms"
    if following is None:
        return line
    return f"{line}; the bucket of {following} costs {1e3 * float(curve(following)) - ms:.2f} ms more"


def _same(step: Step) -> bool:
    """Return whether the replay chose the same as the recorded run."""
    now, then = step.now, step.then
    return bool((now.ks == then.ks).all() and (now.drafters == then.drafters).all())


def _say_retired(names: Sequence[str], steps: Sequence[Step]) -> None:
    from paceline.serve.terminal.display import say

    for number, step in enumerate(steps, start=1):
        for drafter in step.now.retired:
            say(f"step {number}: {names[drafter]} was given up and unloaded, as it could not pay")


def _seconds(step: Step) -> float:
    return step.outcomes.draft_s + step.outcomes.target_s + step.outcomes.host_s


def _one_step(path: str, number: int) -> None:
    from paceline.control.trace_files import replay
    from paceline.serve.terminal.display import say, table

    known: dict[int, list[list[str]]] = {}  # by group: the other group may plan between a plan and its outcome
    stairs: list[Curve | None] = []

    def on_plan(loop: ClosedLoop, group: int) -> None:
        known[group] = _survival(loop)
        stairs[:] = [_staircase(loop)]

    step = next((s for i, s in enumerate(replay(Path(path), on_plan), start=1) if i == number), None)
    if step is None:
        raise ConfigError(f"{path} has no step {number}")
    v, d, o = step.view, step.now, step.outcomes
    say(f"step {number}: {len(v.rows)} rows decode, {v.prefill.tokens} tokens of prefill ride along")
    cells = [
        [str(row), str(length), str(drafter), str(k), " ".join(chances)]
        for row, length, drafter, k, chances in zip(
            v.rows, v.lengths, d.drafters, d.ks, known[step.group], strict=True
        )
    ]
    table("chosen", ("row", "tokens", "drafter", "k", "chance of each depth, by drafter"), cells[:MAX_ROWS_SHOWN])
    counted = zip(o.rows, step.dropped, o.num_verified, o.num_accepted, strict=True)
    got = [list(map(str, line)) for line in counted]
    table("got", ("row", "trimmed", "verified", "kept"), got[:MAX_ROWS_SHOWN])
    if stairs[0] is not None:
        say(bucket_line(stairs[0], _pass_tokens(step)))
    if step.dropped.any():
        say(f"what was trimmed was worth {step.dropped_tokens:.2f} tokens, as believed")
    if step.overlap is not None:
        say(f"overlap: {step.overlap.explain()}; it was {'on' if step.overlapped else 'off'}")
    say(f"expected {1e3 * d.seconds:.1f} ms and {d.tokens:.1f} tokens, took {1e3 * _seconds(step):.1f} ms")


def _survival(loop: ClosedLoop) -> list[list[str]]:
    """Return the expected survival per drafter and depth, by row; none under a fixed policy."""
    from paceline.control.goodput import Goodput

    policy, view = loop.policy, loop.view
    if view is None:
        return []
    if not isinstance(policy, Goodput):
        return [[] for _ in range(view.num_rows)]
    chances: Sequence[list[list[float]]] = policy.choice.expected(view).tolist()
    return [
        [f"{loop.names[d]}: " + " ".join(f"{c:.2f}" for c in rows[i] if c) for d, rows in enumerate(chances)]
        for i in range(view.num_rows)
    ]
