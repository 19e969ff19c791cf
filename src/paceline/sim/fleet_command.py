"""The fleet's part of `paceline simulate`: routes, prefix caches, deaths, scaling."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.core.flags import listed

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

    from paceline.control.files import Profile
    from paceline.control.protocols import Policy
    from paceline.control.scaling import ScalingObjective
    from paceline.sim.fleet import FleetOptions
    from paceline.sim.fleet_runs import FleetSetup
    from paceline.sim.fleet_traces import FleetTrace

MAX_COPIES, MAX_CACHE_PAGES, MAX_SECONDS = 1000, 1 << 24, 1e5


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of fleets."""
    group = parser.add_argument_group("a fleet behind a router (with --route)")
    add = group.add_argument
    add(
        "--route",
        metavar="NAME[,NAME...]",
        help="how requests find replicas: seconds, prefix, least, round-robin; sglang and bare-seconds to compare",
    )
    add("--copies", type=int, default=1, metavar="N", help="services like the trace, with pages of their own")
    add(
        "--clock", choices=("fluid", "steps"), default="fluid", help="constant rates between events, or every step"
    )
    add(
        "--cache-pages",
        type=int,
        default=2000,
        metavar="N",
        help="pages that a replica keeps, of the trace's size",
    )
    add(
        "--prefill-rate",
        type=float,
        metavar="N",
        help="prompt tokens a second, for a profile of whole steps, which does not know it",
    )
    add("--speeds", default="1", metavar="X[,X...]", help="speeds of the replicas, in turn")
    add("--deaths", metavar="SPEC", help="RATE/h, rack:RATE/h,REPLICAS or waves:RATE/h,SHARE, of the whole fleet")
    add("--resume", choices=("on", "off"), default="on", help="whether answers outlive their replica")
    add("--back", type=float, default=15.0, metavar="S", help="from a death until the replica is back")
    add(
        "--objective",
        metavar="TPOT_MS[,BACKLOG_S]",
        help="start and drain replicas, 1 to --replicas, to keep time per token and waiting prompts below these",
    )
    add("--start", type=float, default=60.0, metavar="S", help="that a replica takes to start")


def run(args: Namespace, profile: Profile, rows: int, make_policy: Callable[[], Policy]) -> int:
    """Simulate the routes and print a table. make_policy: of each replica."""
    from paceline.serve.terminal.display import progress, table
    from paceline.sim.fleet_runs import figures
    from paceline.sim.rival_routes import any_route

    _check(args)
    routes = args.route.split(",")
    for name in routes:
        any_route(name)  # a wrong name is refused before anything runs
    trace = _trace(args)
    setup = _setup(args, profile, rows, make_policy, trace)
    asked = [(name, _options(args)) for name in routes]  # each draws the same deaths
    found: list[dict[str, Any]] = []
    with progress("simulating") as update:
        for number, (name, options) in enumerate(asked):
            told = partial(_told, update, number, len(routes))
            found.append({"route": name} | figures(setup.run(trace, any_route(name), options, told)))
    title = f"{args.replicas} replicas, {len(trace)} requests, simulated on {args.profile}"
    table(title, COLUMNS, [_cells(f) for f in found])
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "found": found}, default=str))
    return 0


def _told(update: Any, number: int, routes: int, done: int, total: int) -> None:
    update(number * total + done, routes * total)


COLUMNS = (
    "route",
    "hits",
    "TTFT mean s",
    "p50",
    "p99",
    "TPOT ms",
    "busiest/mean",
    "lost",
    "moved",
    "wasted tokens",
    "replica hours",
)


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    times = (found[name] for name in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s"))
    tpot = found["tpot_mean_s"]
    return (
        found["route"],
        f"{found['hits']:.3f}",
        *("-" if t is None else f"{t:.2f}" for t in times),
        "-" if tpot is None else f"{1e3 * tpot:.1f}",
        f"{found['busiest']:.2f}",
        *(str(found[name]) for name in ("lost", "moved", "wasted_tokens")),
        f"{found['replica_hours']:.2f}",
    )


def _check(args: Namespace) -> None:
    for name, value, low, high in (
        ("--copies", args.copies, 1, MAX_COPIES),
        ("--cache-pages", args.cache_pages, 0, MAX_CACHE_PAGES),
        ("--prefill-rate", args.prefill_rate or 1, 1, 1e9),
        ("--back", args.back, 0, MAX_SECONDS),
        ("--start", args.start, 0, MAX_SECONDS),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} must be between {low} and {high:g}, not {value}")


def _trace(args: Namespace) -> FleetTrace:
    import numpy as np

    from paceline.sim import fleet_traces, workloads

    trace = workloads.asked(args, 16 * args.replicas, np.random.default_rng(args.seed))
    if len(trace) * args.copies > fleet_traces.MAX_REQUESTS:
        raise ConfigError(f"--copies {args.copies}: a run has at most {fleet_traces.MAX_REQUESTS} requests")
    return trace.repeated(args.copies) if args.copies > 1 else trace


def _setup(
    args: Namespace, profile: Profile, rows: int, make_policy: Callable[[], Policy], trace: FleetTrace
) -> FleetSetup:
    from paceline.control.cost import TableCost
    from paceline.sim.fleet_runs import FleetSetup
    from paceline.sim.rates import kind_of
    from paceline.sim.simulator import SimulatedReplica

    if isinstance(profile.cost, TableCost) and not args.prefill_rate:
        raise ConfigError("this profile does not know what prompts cost; give --prefill-rate")
    kind = kind_of(profile, SimulatedReplica(rows), make_policy, args.prefill_rate, args.scale)
    speeds = _numbers("--speeds", args.speeds, 1e-3, 1e3)
    exact = args.clock == "steps"
    return FleetSetup.of(args.replicas, kind, trace, speeds=speeds, step_exact=exact, seed=args.seed)


def _options(args: Namespace) -> FleetOptions:
    from paceline.sim.faults import deaths
    from paceline.sim.fleet import FleetOptions

    return FleetOptions(
        args.cache_pages,
        deaths(args.deaths, args.replicas, args.seed) if args.deaths else (),
        resume=args.resume == "on",
        back_s=args.back,
        objective=_objective(args),
        start_s=args.start,
    )


def _objective(args: Namespace) -> ScalingObjective | None:
    from paceline.control.scaling import ScalingObjective

    if not args.objective:
        return None
    tpot_ms, *backlog_s = _numbers("--objective", args.objective, 1e-3, 1e6)
    found = ScalingObjective(tpot_ms / 1e3, backlog_s[0] if backlog_s else 1.0, most=args.replicas)
    found.check()
    return found


def _numbers(name: str, text: str, low: float, high: float) -> tuple[float, ...]:
    values = listed(text, float)
    if not values or not all(low <= value <= high for value in values):
        raise ConfigError(f"{name} {text}: write numbers between {low:g} and {high:g}")
    return values
