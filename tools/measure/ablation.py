"""Worth of each mechanism of the controller: `python -m tools.measure.ablation --prompts FILE.jsonl`.

It builds an engine with `--draft auto`, as users get it. For each mechanism it builds a variant, an engine in
which the mechanism is replaced by its neutral element. All engines are in one process, share the target's weights
and answer the same questions. They take turns by the second; the engine furthest behind is next. The table has
each variant's tokens per second relative to full `auto` in the same repeat: below 1, the mechanism is worth its
place. `auto again`, an equal engine, tells how large a difference means nothing. With `--simulate PROFILE.json`
the same policies run in the simulator, on the costs and the acceptance of a profile that has both; mechanisms that
the simulator does not exercise are left out.

Each engine has KV of its own, about 1 GB for the default model with 64 in flight. Where memory is short,
`--without` takes a few variants at a time.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paceline.bench.interleave import SLICE_S, SlicedRun, interleave, make_questions
from paceline.bench.prompt_file import read_prompts
from paceline.bench.session import SPARE_TOKENS
from paceline.bench.statistics import median_interval, paired_ratios
from paceline.control.controller import ClosedLoop
from paceline.control.files import conditional, read_profile, step_cost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.plan_reuse import Hysteresis, PlanReuse
from paceline.control.policy import NO_WORK
from paceline.control.probes import Probes
from paceline.core.errors import ConfigError
from paceline.core.params import MAX_TOKENS, SamplingParams
from paceline.engine.assembly.build import assemble, load
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.engine.assembly.config import MAX_ROWS
from paceline.model.template import compiled
from paceline.serve.prompts import Prompts
from paceline.serve.terminal.output_files import check_file
from paceline.sim.simulator import SimulatedReplica, Simulator
from paceline.sim.workloads import Sizes, drafted, make
from tools.entry import exit_status

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.bench.interleave import Question
    from paceline.control.allocation import RowDrafts
    from paceline.control.files import Profile
    from paceline.control.policy import Allocation, Decision, Drafted, Outcomes, StepView
    from paceline.control.protocols import StepAccounting
    from paceline.engine.engine import Engine

    Rates = dict[tuple[str, int], list[float]]  # tokens per second of each repeat, by variant and number in flight

FULL, AGAIN = "auto", "auto again"
MAX_REPEATS, MAX_LIMIT = 1000, 1_000_000
REQUESTS_PER_ROW = 4  # fewest questions for each request in flight; with few prompts some come again
SPREAD = 1.0  # logits: how much simulated requests differ in acceptance
TINY = 1e-12  # a variance with which an estimate does not move


# Neutral elements --------------------------------------------------------------------------------


class _NoTrim(Goodput):
    @property
    def may_trim(self) -> bool:
        return False


class _NoPrefillPrice(Goodput):
    """Plans without prefill in the pass, and so without a budget for it."""

    def reuse(self, view: StepView) -> Decision | None:
        return super().reuse(replace(view, prefill=NO_WORK))

    def choose(self, view: StepView) -> Decision:
        return super().choose(replace(view, prefill=NO_WORK))

    def trim(self, view: StepView, drafted: Drafted) -> Any:
        return super().trim(replace(view, prefill=NO_WORK), drafted)


class _Forgetful(Goodput):
    """Goodput that drops a part of what it has learnt after each step."""

    def admit(self, row: int) -> None:
        super().admit(row)
        self._clear()

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        super().learn(view, outcomes)
        self._clear()

    def _clear(self) -> None:
        raise NotImplementedError


class _NoRowHistory(_Forgetful):
    """Rows do not differ: their offsets stay 0, without variance."""

    def _clear(self) -> None:
        for model in self.choice.models:
            model.row_logit[:] = 0.0
            model.row_var[:] = model.shared[0] = TINY


class _NoConfidence(_Forgetful):
    """A draft's confidence says nothing: its weight stays 0."""

    def _clear(self) -> None:
        for model in self.choice.models:
            model.shared[1:] = 0.0, TINY


class _NoBeginMargin(Hysteresis):
    def speculate(self, allocation: Allocation, step: int = 0) -> bool:
        self.speculates = True  # the margin is for a policy that does not speculate yet
        return super().speculate(allocation, step)


class _NoRealisedRatio(Hysteresis):
    def learn(self, outcomes: Outcomes) -> None:
        del outcomes


class _NoPlanReuse(PlanReuse):
    def serves_many(self, step: int) -> bool:
        del step
        return False

    def reuse(self, view: StepView, step: int) -> Decision | None:
        del view, step
        return None


class _NoPlainProbes(Probes):
    def plain_is_due(self, step: int, drafts: bool, gain: float, loss_s: float, load: int) -> bool:
        del step, drafts, gain, loss_s, load
        return False


class _NoHostTime(OnlineCost):
    """The host's time is 0, with drafts and without."""

    def account_step(self, *step: Any, **options: Any) -> StepAccounting:
        accounting = super().account_step(*step, **options)
        self.host.row_s[:] = 0.0
        return accounting


class _NoCorrection(OnlineCost):
    """Prices of passes and drafting stay as measured; the host's time is learnt."""

    def account_step(self, *step: Any, **options: Any) -> StepAccounting:
        p = self.passes
        arrays = p.log_error, p.seconds, p.seen, p.last, self.key_price, self.draft_factor, self.draft_steps
        kept, drift = [array.copy() for array in arrays], self.machine_drift
        accounting = super().account_step(*step, **options)
        for array, before in zip(arrays, kept, strict=True):
            array[:] = before
        self.machine_drift = drift
        return accounting


class _FreeReading(OnlineCost):
    def reading_s(self, view: StepView, *, one_step: bool = False) -> NDArray[float64]:
        return np.zeros((len(self.reading.token_s), view.num_rows))


# Variants ----------------------------------------------------------------------------------------


def _policy(kind: type[Goodput]) -> Callable[[Goodput], None]:
    def change(policy: Goodput) -> None:
        policy.__class__ = kind

    return change


def _hysteresis(kind: type[Hysteresis]) -> Callable[[Goodput], None]:
    return lambda policy: setattr(policy, "hysteresis", kind())


def _cost(kind: type[OnlineCost]) -> Callable[[Goodput], None]:
    def change(policy: Goodput) -> None:
        cost = policy.choice.cost
        assert isinstance(cost, OnlineCost)
        cost.__class__ = kind
        if kind is _NoHostTime:
            cost.host.row_s[:] = 0.0
            setattr(cost.host, "observe", lambda *_, **__: None)  # noqa: B010 (a method, to mypy)

    return change


def _row_by_row(policy: Goodput) -> None:
    setattr(policy.choice, "choose_in_one_call", lambda *_: None)  # noqa: B010


def _no_upward_probes(policy: Goodput) -> None:
    def keep(_view: StepView, _step: int, chosen: RowDrafts, _s: float) -> tuple[RowDrafts, tuple[int, ...]]:
        return chosen, ()

    setattr(policy.exploration, "probe_upward", keep)  # noqa: B010


def _no_retirement(policy: Goodput) -> None:
    setattr(policy.exploration.retirement, "due", lambda _: ())  # noqa: B010


def _no_stop_rules(policy: Goodput) -> None:
    policy.choice.stoppable = [None] * len(policy.choice.models)


class Variant(NamedTuple):
    """A controller without one of its mechanisms."""

    change: Callable[[Goodput], None]  # puts the neutral element in its place
    simulated: bool = True  # the simulator exercises it


VARIANTS: Mapping[str, Variant] = {
    "trim": Variant(_policy(_NoTrim), simulated=False),
    "choice in one call": Variant(_row_by_row, simulated=False),
    "margin to begin": Variant(_hysteresis(_NoBeginMargin)),
    "realised ratio": Variant(_hysteresis(_NoRealisedRatio)),
    "price of reading": Variant(_cost(_FreeReading), simulated=False),
    "plan reuse": Variant(lambda policy: setattr(policy, "plan_reuse", _NoPlanReuse())),
    "upward probes": Variant(_no_upward_probes),  # and with them retirement, which rests on them
    "plain probes": Variant(lambda policy: setattr(policy.exploration, "probes", _NoPlainProbes())),
    "retirement": Variant(_no_retirement, simulated=False),
    "stop rules": Variant(_no_stop_rules, simulated=False),
    "host time": Variant(_cost(_NoHostTime), simulated=False),
    "online correction": Variant(_cost(_NoCorrection), simulated=False),
    "prefill price": Variant(_policy(_NoPrefillPrice)),
    "row history": Variant(_policy(_NoRowHistory)),
    "confidence": Variant(_policy(_NoConfidence), simulated=False),
}


def without(name: str, policy: Goodput) -> Goodput:
    """Return a policy without a mechanism; whole for `FULL` and `AGAIN`."""
    if name in VARIANTS:
        VARIANTS[name].change(policy)
    return policy


# In engines --------------------------------------------------------------------------------------


def ablate(engine: Engine, name: str) -> None:
    """Take a mechanism out of an engine's controller for good. Raises `ConfigError`."""
    make_loop = engine._new_controller

    def begin() -> ClosedLoop:
        loop = make_loop()
        if not isinstance(loop, ClosedLoop) or not isinstance(loop.policy, Goodput) or loop.cost is None:
            raise ConfigError("ablation is for --draft auto with measured costs")
        without(name, loop.policy)
        return loop

    engine.control_by(begin)


def in_engines(args: Namespace, names: Sequence[str], sizes: Sequence[int]) -> Rates:
    """Return the rates of engines that are asked the same questions, interleaved."""
    config = replace(engine_config(args), overlap="off")
    loaded = load(config)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    max_len = min(config.limits.max_len, loaded.decoder.config.max_context)
    encode = Prompts(loaded.tokenizer, compiled(loaded.template), max_len)
    prompts = read_prompts(args.prompts, args.limit)
    longest = max(len(q.request.prompt_ids) for q in make_questions(prompts, encode, params, 0))
    room = min(max_len, longest + params.max_tokens + SPARE_TOKENS)
    limits = replace(config.limits, num_rows=max(sizes), max_len=room)
    engines = {name: assemble(replace(config, limits=limits, keep_learnt=False), loaded).engine for name in names}
    for name, engine in engines.items():
        ablate(engine, name)
    rates: Rates = {}
    with Progress(console=Console(stderr=True)) as progress:
        for size in sizes:
            count = max(len(prompts), REQUESTS_PER_ROW * size)
            asked = make_questions(list(islice(cycle(prompts), count)), encode, params, 0)
            for engine in engines.values():  # touch all memory of a size before any variant is timed
                interleave([SlicedRun(engine, asked[:size], size)])
            task = progress.add_task(f"{size} in flight", total=count * len(names) * args.repeat)
            for repeat in range(args.repeat):
                done = repeat * count * len(names)
                tell = _advance(progress, task, done)
                for name, rate in _repeat(engines, asked, size, tell).items():
                    rates.setdefault((name, size), []).append(rate)
    return rates


def _advance(progress: Progress, task: Any, done: int) -> Callable[[int], None]:
    return lambda count: progress.update(task, completed=done + count)


def _repeat(
    engines: Mapping[str, Engine], asked: Sequence[Question], size: int, tell: Callable[[int], None]
) -> dict[str, float]:
    """Return the tokens per second of each engine, all cold at the start."""
    for engine in engines.values():
        engine.forget()
    runs = {name: SlicedRun(engine, asked, size) for name, engine in engines.items()}
    interleave(list(runs.values()), SLICE_S, tell)
    return {name: run.rate for name, run in runs.items()}


# In the simulator --------------------------------------------------------------------------------


def in_simulator(args: Namespace, names: Sequence[str], sizes: Sequence[int]) -> Rates:
    """Return the rates of simulated engines; a repeat is a seed. Raises `ConfigError`."""
    profile = read_profile(Path(args.simulate))
    if not profile.accepted_at or len(profile.drafters) != 1:
        raise ConfigError(f"--simulate {args.simulate}: a profile with one drafter and its acceptance is needed")
    rates: Rates = {}
    for size in sizes:
        for seed in range(args.repeat):
            for name in names:
                rate = _simulated(profile, name, size, seed, args.max_tokens)
                rates.setdefault((name, size), []).append(rate)
    return rates


def _simulated(profile: Profile, name: str, size: int, seed: int, max_tokens: int) -> float:
    chances = np.clip(conditional(profile.accepted_at), 0.001, 0.999)
    sizes = Sizes(prompt_tokens=max_tokens, output_tokens=max_tokens)
    rng = np.random.default_rng(seed)
    load = drafted(make("closed", REQUESTS_PER_ROW * size, sizes, rng), chances, SPREAD, rng)
    cost = step_cost(profile)
    policy = without(name, Goodput(cost, size, (len(chances),), (chances,)))
    return Simulator(load, SimulatedReplica(size), cost, policy, seed).run().throughput


# Command -----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run all variants, print a table, and write it as JSON if asked. Raises `ConfigError`."""
    args = _parser().parse_args(argv)
    names, sizes = _checked(args)
    rates = (in_simulator if args.simulate else in_engines)(args, names, sizes)
    found = summary(rates, names, sizes)
    table = Table("without", *(f"{size} in flight" for size in sizes), title=f"tokens/s relative to {FULL}")
    for name in names:
        table.add_row(name, *(_cell(found[name, size]) for size in sizes))
    Console().print(table)
    if args.json:
        rows = [{"without": name, "in_flight": size} | found[name, size] for name in names for size in sizes]
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "found": rows}, default=str))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m tools.measure.ablation", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--prompts", metavar="FILE.jsonl", help="questions, as for `paceline bench`")
    add("--simulate", metavar="PROFILE.json", help="in the simulator, on a profile's costs and acceptance")
    add("--sizes", default="1,4,16,64", metavar="N[,N...]", help="requests in flight (1,4,16,64)")
    add("--repeat", type=int, default=5, metavar="R", help="runs of each variant at each size (5)")
    add("--limit", type=int, metavar="N", help="only N prompts, evenly spaced over the file")
    add("--max-tokens", type=int, default=128, metavar="M", help="tokens of an answer, at most (128)")
    add(
        "--without", action="append", metavar="NAME", help=f"only this one; may be repeated: {', '.join(VARIANTS)}"
    )
    add("--json", metavar="FILE", help="write all rates there")
    add_engine_arguments(parser)
    return parser


def _checked(args: Namespace) -> tuple[list[str], list[int]]:
    """Return the variants and the numbers in flight. Raises `ConfigError`."""
    check_file("--json", args.json)
    if not args.prompts and not args.simulate:
        raise ConfigError("give --prompts FILE.jsonl, or --simulate PROFILE.json")
    try:
        sizes = [int(word) for word in args.sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--sizes must be numbers such as 1,4,16, not {args.sizes!r}") from None
    bounds = [("--sizes", size, MAX_ROWS) for size in sizes]
    bounds += [("--repeat", args.repeat, MAX_REPEATS), ("--max-tokens", args.max_tokens, MAX_TOKENS)]
    bounds += [("--limit", args.limit, MAX_LIMIT)] if args.limit is not None else []
    for name, value, limit in bounds:
        if not 1 <= value <= limit:
            raise ConfigError(f"{name} must be between 1 and {limit}, not {value}")
    known = [name for name, variant in VARIANTS.items() if variant.simulated or not args.simulate]
    for name in args.without or ():
        if name not in known:
            raise ConfigError(f"--without {name}: known here are {', '.join(known)}")
    chosen = [name for name in known if name in (args.without or known)]
    return [FULL, *([] if args.simulate else [AGAIN]), *chosen], sizes


def summary(rates: Rates, names: Sequence[str], sizes: Sequence[int]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return ratios to `FULL` with bootstrap intervals, by variant and size."""
    found = {}
    for name in names:
        for size in sizes:
            ratios = paired_ratios(rates[name, size], rates[FULL, size])
            found[name, size] = {"tokens_per_s": rates[name, size], "ratios": ratios, **median_interval(ratios)}
    return found


def _cell(found: Mapping[str, Any]) -> str:
    middle = f"{found['median']:.3f}"
    return middle if found["low"] is None else f"{middle} ({found['low']:.3f} to {found['high']:.3f})"


if __name__ == "__main__":
    sys.exit(exit_status(main))
