"""`paceline simulate`: compare policies without a model, on measured costs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.core.flags import listed, numbers_of
from paceline.core.params import MAX_SEED
from paceline.sim import fleet_command

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

    from paceline.control.files import Profile
    from paceline.control.protocols import Policy
    from paceline.sim.simulator import Simulated, Simulator, Workload

ALL = ("off", *(f"static:{k}" for k in (1, 3, 5)), "table", "average", "turbospec", "ours")
POLICIES = "off, static:K, table, average, turbospec, ours"
USUAL_ROWS = "1,4,16,64,256"
MAX_REPLICAS, MAX_ROWS = 4096, 1024
MAX_DEPTH = 16  # drafts of a row, at most


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "--profile",
        required=True,
        metavar="FILE",
        help="what steps cost: of `paceline profile`, or of vLLM's format",
    )
    add(
        "--drafter",
        metavar="NAME",
        help="drafter of the profile whose times drafts take (default: the only one with times)",
    )
    add("--policy", action="append", metavar="NAME", help=f"one of {POLICIES}; may be repeated (default: all)")
    add("--rows", default=USUAL_ROWS, metavar="N[,N...]", help="requests that run at once, on each replica")
    add("--replicas", type=int, default=1, metavar="N", help="engines that share the requests")
    add("--requests", type=int, metavar="N", help="requests in all (default: 16 for every row; all of a trace)")
    add("--arrivals", default="closed", metavar="SPEC", help="closed, poisson:RATE or bursts:RATE,SIZE")
    add("--trace", metavar="FILE", help="requests of a file instead, perhaps compressed (.gz)")
    add(
        "--trace-format",
        choices=("jsonl", "mooncake", "azure"),
        default="jsonl",
        help="jsonl: lines with arrival_s, prompt_tokens, output_tokens and perhaps hash_ids (default)",
    )
    add("--prompt-tokens", type=int, default=1, metavar="N")
    add("--output-tokens", type=int, default=256, metavar="N")
    add("--tail", type=float, default=0.0, metavar="S", help="standard deviation of the log of answers' lengths")
    add(
        "--acceptance",
        default="",
        metavar="P[,P...]",
        help="share of drafts kept by depth (default: the profile's)",
    )
    add(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="drafts are kept X times as often as the policies think",
    )
    add(
        "--overlap",
        choices=("off", "on"),
        default="off",
        help="draft for one half of the rows while the other is scored",
    )
    add(
        "--draft-device",
        choices=("same", "own"),
        default="own",
        help="with --overlap on: whether drafters wait for the target's device or have their own",
    )
    add("--spread", type=float, default=0.0, metavar="S", help="how much requests differ in acceptance, in logits")
    add("--seed", type=int, default=0, metavar="N")
    add("--json", metavar="FILE", help="write the table there too")
    fleet_command.add_arguments(parser)


def run(args: Namespace) -> int:
    """Simulate and print a table."""
    from paceline.serve.terminal.display import progress, table

    _check(args)
    profile = _profile(args)
    policies, sizes = args.policy or ALL, numbers_of("--rows", args.rows, 1, MAX_ROWS)
    for name in policies:
        policy_of(name, profile, 1)  # a wrong name is refused before anything runs
    if args.route:
        return _run_fleet(args, profile, sizes)
    found: list[dict[str, Any]] = []
    with progress("simulating") as update:
        for number, (rows, name) in enumerate((r, p) for r in sizes for p in policies):
            update(number, len(sizes) * len(policies))
            found.append({"rows": rows, "policy": name} | _simulate(args, profile, rows, name))
    best = {rows: max(f["tokens_per_s"] for f in found if f["rows"] == rows) for rows in sizes}
    cells = [
        (
            str(f["rows"]),
            f["policy"],
            f"{f['tokens_per_s']:.1f}",
            f"{f['tokens_per_s'] / best[f['rows']]:.3f}",
            _milliseconds(f["tpot_s"]),
            _milliseconds(f["tpot_p99_s"]),
            f"{f['tokens_per_pass']:.2f}",
            str(f["steps"]),
        )
        for f in found
    ]
    columns = ("rows", "policy", "tokens/s", "of the best", "TPOT ms", "p99", "tokens a pass", "steps")
    table(f"simulated on {args.profile}{_drafts_of(profile)}", columns, cells, num_left=2)
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "found": found}, default=str))
    return 0


def _run_fleet(args: Namespace, profile: Profile, sizes: tuple[int, ...]) -> int:
    """Simulate a fleet of one policy; rows are 64 where they are not given."""
    rows, policies = (64,) if args.rows == USUAL_ROWS else sizes, args.policy or ["ours"]
    if len(rows) != 1 or len(policies) != 1 or args.overlap != "off" or args.spread:
        raise ConfigError("--route: give one number of --rows and one --policy, no --overlap and no --spread")
    return fleet_command.run(args, profile, rows[0], partial(policy_of, policies[0], profile, rows[0]))


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def _check(args: Namespace) -> None:
    from paceline.serve.terminal.output_files import check_file
    from paceline.sim.fleet_traces import MAX_REQUEST_TOKENS, MAX_REQUESTS

    check_file("--json", args.json)
    for name, value, low, high in (
        ("--replicas", args.replicas, 1, MAX_REPLICAS),
        ("--requests", 1 if args.requests is None else args.requests, 1, MAX_REQUESTS),
        ("--prompt-tokens", args.prompt_tokens, 1, MAX_REQUEST_TOKENS),
        ("--output-tokens", args.output_tokens, 1, MAX_REQUEST_TOKENS),
        ("--tail", args.tail, 0, 5),
        ("--scale", args.scale, 0, 100),
        ("--spread", args.spread, 0, 10),
        ("--seed", args.seed, 0, MAX_SEED),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} must be between {low} and {high}, not {value}")


def _profile(args: Namespace) -> Profile:
    """Return the costs and the acceptance of one drafter. Raises `ConfigError`."""
    from paceline.control.files import read_profile

    profile = of_drafter(read_profile(Path(args.profile)), args.drafter)
    rates = _shares(args.acceptance) if args.acceptance else profile.accepted_at
    if not rates:
        raise ConfigError("this profile does not know how often drafts are kept; give --acceptance")
    return replace(profile, accepted_at=rates)


def _shares(text: str) -> tuple[float, ...]:
    """Read the share of drafts kept at depth 1, 2, ... Raises `ConfigError`."""
    shares = listed(text, float)
    if not shares:
        raise ConfigError(f"--acceptance must be shares such as 0.7,0.5,0.3, not {text!r}")
    if not all(0 <= share <= 1 for share in shares) or any(b > a for a, b in pairwise(shares)):
        raise ConfigError(
            "--acceptance: shares of all drafts kept at depth 1, 2, ... lie between 0 and 1 and never rise"
        )
    if len(shares) > MAX_DEPTH:
        raise ConfigError(f"--acceptance: drafts are at most {MAX_DEPTH} deep, not {len(shares)}")
    return shares


def of_drafter(profile: Profile, name: str | None) -> Profile:
    """Return a profile with the costs of one drafter.

    It is the named one, or the only one that takes time. Raises `ConfigError` if there is no such drafter, or more
    than one.
    """
    from paceline.control.cost import DraftCost, MeasuredCost, TableCost

    cost, names = profile.cost, profile.drafters
    known = ", ".join(names) or "none"
    if name is not None and name not in names:
        raise ConfigError(f"--drafter {name}: the profile's drafters are: {known}")
    if isinstance(cost, TableCost):
        return profile
    if not names:  # no drafter: drafts cost nothing
        return replace(profile, cost=MeasuredCost(cost.target, (DraftCost(()),)))
    slow = [n for n, drafter in zip(names, cost.drafters, strict=True) if drafter.max_depth]
    usual = names if len(names) == 1 else slow
    if name is None and len(usual) != 1:
        raise ConfigError(f"this profile has several drafters; choose one with --drafter: {known}")
    name = name or usual[0]
    own = MeasuredCost(cost.target, (cost.drafters[names.index(name)],))
    return replace(profile, cost=own, drafters=(name,), trained_acceptance=(), honours_stops=(), late=())


def _drafts_of(profile: Profile) -> str:
    """Return the end of the table's title: the drafter, and whether its drafts cost nothing."""
    from paceline.control.cost import TableCost

    if isinstance(profile.cost, TableCost):
        return ""
    free = not any(drafter.max_depth for drafter in profile.cost.drafters)
    whose = f", drafts of {profile.drafters[0]}" if profile.drafters else ", drafts"
    return f"{whose}{' that cost nothing' if free else ''}"


def _simulate(args: Namespace, profile: Profile, rows: int, name: str) -> dict[str, Any]:
    from paceline.control.files import step_cost
    from paceline.sim.simulator import SimulatedReplica
    from paceline.sim.workloads import split

    simulator = _simulator(args, profile)
    done = [
        simulator(
            part, SimulatedReplica(rows), step_cost(profile), policy_of(name, profile, rows), args.seed
        ).run()
        for part in split(_workload(args, profile, rows), args.replicas)
    ]
    return _figures(done)


def _simulator(args: Namespace, profile: Profile) -> Callable[..., Simulator]:
    """Return the simulator of the loop that was asked for. Raises `ConfigError`."""
    from paceline.control.cost import TableCost
    from paceline.sim.simulator import OverlapSimulator, Simulator

    if args.overlap == "off":
        return Simulator
    if isinstance(profile.cost, TableCost):
        raise ConfigError("--overlap on: this profile does not tell drafting from passes; use `paceline profile`")
    return partial(OverlapSimulator, apart=args.draft_device == "own")


def _figures(done: list[Simulated]) -> dict[str, Any]:
    import numpy as np

    tpot = np.concatenate([d.tpot_s for d in done])
    tpot = tpot[~np.isnan(tpot)]  # answers of one token have none
    start, end = (min(d.workload.arrival_s[0] for d in done), max(d.end_s.max() for d in done))
    tokens, passes = (sum(int(getattr(d, n)) for d in done) for n in ("num_tokens", "passes"))
    return {
        "tokens_per_s": tokens / float(end - start),
        "tpot_s": float(tpot.mean()) if len(tpot) else None,
        "tpot_p99_s": float(np.percentile(tpot, 99)) if len(tpot) else None,
        "tokens_per_pass": 1 + sum(d.accepted for d in done) / max(passes, 1),
        "steps": sum(d.num_steps for d in done),
    }


def _workload(args: Namespace, profile: Profile, rows: int) -> Workload:
    import numpy as np

    from paceline.control.files import conditional
    from paceline.sim import workloads

    chances = np.clip(conditional(profile.accepted_at) * args.scale, 0.001, 0.999)
    rng = np.random.default_rng(args.seed)
    return workloads.drafted(workloads.asked(args, 16 * rows * args.replicas, rng), chances, args.spread, rng)


def policy_of(name: str, profile: Profile, rows: int) -> Policy:
    """Return a policy by name, as deep as acceptance is known. Raises `ConfigError`."""
    import numpy as np

    from paceline.control.files import conditional, step_cost
    from paceline.control.goodput import Goodput
    from paceline.sim.baselines import BatchTable, MovingAverage, Static, TurboSpec

    cost, depth = step_cost(profile), len(profile.accepted_at)
    prior = np.clip(conditional(profile.accepted_at), 0.001, 0.999)
    makers: dict[str, Callable[[], Policy]] = {
        "off": lambda: Static(0),
        "table": BatchTable,
        "average": lambda: MovingAverage(ks=(1, 3, 5)),
        "turbospec": lambda: TurboSpec(cost, depth),
        "ours": lambda: Goodput(cost, rows, (depth,), (prior,)),
    }
    kind, _, k = name.partition(":")
    if kind == "static" and k.isdecimal() and int(k) <= MAX_DEPTH:
        return Static(int(k))
    if name not in makers:
        raise ConfigError(f"--policy {name}: known are {POLICIES}")
    return makers[name]()
