"""Studies of a simulated fleet, with tables and pictures: `python -m tools.measure.fleet STUDY --plot FILE`.

- `routers`: ways to choose a replica, at three sizes, on the Mooncake trace
- `deaths`: what is lost with and without resume, as replicas die alone, by racks and in waves
- `day`: the scaler over a day, made of the hour of an Azure trace, beside fixed sizes
- `tails`: the end of a roll-out, spread over all replicas or packed onto few

A replica has the decode steps of the H100 profile and computes 5,000 prompt tokens a second. Over the day it has a
quarter of that speed.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.bench.pictures import DPI, new_figure
from paceline.control.files import read_profile
from paceline.control.routing import policy_named
from paceline.control.scaling import ScalingObjective
from paceline.serve.terminal.display import plain_table, progress
from paceline.sim.command import policy_of
from paceline.sim.faults import deaths as deaths_of
from paceline.sim.fleet import FleetOptions
from paceline.sim.fleet_runs import FleetSetup, figures
from paceline.sim.fleet_traces import FleetTrace, read_fleet_trace
from paceline.sim.rates import ReplicaKind, kind_of
from paceline.sim.rival_routes import any_route
from paceline.sim.simulator import SimulatedReplica
from tools.entry import exit_status

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from paceline.sim.fleet import FleetResult

DATA = Path("../shared/data")
PREFILL_RATE, ROWS = 5000.0, 64
HOUR_S = 3600.0


def kind(policy: str = "ours") -> ReplicaKind:
    """Return the kind of all replicas here."""
    profile = read_profile(DATA / "dynamic_sd_h100_llama31_8b.json")
    return kind_of(profile, SimulatedReplica(ROWS), partial(policy_of, policy, profile, ROWS), PREFILL_RATE)


def mooncake() -> FleetTrace:
    """Return the hour of conversations."""
    return read_fleet_trace(DATA / "mooncake_conversation.jsonl.gz", "mooncake")


def say(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], num_left: int = 1) -> None:
    """Print a table."""
    sys.stdout.write(plain_table(title, columns, cells, num_left) + "\n")


# Routers -----------------------------------------------------------------------------------------

ROUTES = ("seconds", "bare-seconds", "prefix", "sglang", "least", "round-robin")
SIZES = ((8, 4000), (16, 2000), (64, 1000))  # replicas, and pages of 512 tokens that each keeps


def routers() -> Any:
    """Compare ways to choose a replica; draw hits and TTFT."""
    trace, found = mooncake(), {}
    with progress("routers") as update:
        for number, (size, pages) in enumerate(SIZES):
            setup = FleetSetup.of(size, kind(), trace)
            for index, route in enumerate(ROUTES):
                update(number * len(ROUTES) + index, len(SIZES) * len(ROUTES))
                result = setup.run(trace, any_route(route), FleetOptions(cache_pages=pages))
                found[size, route] = figures(result)
    cells = [
        (
            str(size),
            route,
            f"{f['hits']:.3f}",
            *(f"{f[n]:.2f}" for n in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")),
            f"{f['ttft_mean_s'] / found[size, 'round-robin']['ttft_mean_s']:.2f}",
            f"{f['busiest']:.2f}",
        )
        for (size, route), f in found.items()
    ]
    columns = ("replicas", "route", "hits", "TTFT mean s", "p50", "p99", "to round-robin", "busiest/mean")
    say(f"{len(trace)} requests", columns, cells, 2)
    figure = new_figure(8.0, 3.4)
    for axes, name, what in zip(
        figure.subplots(1, 2),
        ("hits", "ttft_mean_s"),
        ("share of prompt tokens in a cache", "TTFT mean, s"),
        strict=True,
    ):
        _bars(axes, [[found[size, route][name] for size, _ in SIZES] for route in ROUTES], ROUTES)
        axes.set_xticks(range(len(SIZES)), [f"{size} replicas" for size, _ in SIZES])
        axes.set_title(what, fontsize=10)
    figure.axes[1].set_ylim(0, 6)
    figure.axes[1].legend(fontsize=7)
    return figure


def _bars(axes: Any, series: Sequence[Sequence[float]], labels: Sequence[str]) -> None:
    """Draw groups of bars, one of each series in a group."""
    width = 0.8 / len(series)
    for index, (heights, label) in enumerate(zip(series, labels, strict=True)):
        places = np.arange(len(heights)) + (index - (len(series) - 1) / 2) * width
        axes.bar(places, heights, width, label=label)


# Deaths ------------------------------------------------------------------------------------------

DEATHS = ("6/h", "60/h", "rack:12/h,4", "waves:12/h,0.25", "waves:60/h,0.25")


def deaths() -> Any:
    """Compare deaths with and without resume; draw lost answers and wasted tokens."""
    trace, found = mooncake(), {}
    setup = FleetSetup.of(16, kind(), trace)
    for spec in DEATHS:
        planned = [*takewhile(lambda d: d.at_s < trace.arrival_s[-1], deaths_of(spec, 16, seed=1))]
        for resume in (True, False):
            options = FleetOptions(deaths=planned, resume=resume, back_s=60.0)
            found[spec, resume] = figures(setup.run(trace, policy_named("seconds"), options))
            found[spec, resume]["deaths"] = sum(len(d.replicas) for d in planned)
    cells = [
        (
            spec,
            "on" if resume else "off",
            *(str(f[n]) for n in ("deaths", "lost", "moved")),
            f"{f['wasted_tokens'] / trace.prompt_lens.sum():.2%}",
            f"{f['ttft_mean_s']:.2f}",
            f"{f['ttft_p99_s']:.1f}",
        )
        for (spec, resume), f in found.items()
    ]
    columns = (
        "deaths",
        "resume",
        "died",
        "answers lost",
        "moved",
        "wasted of prompt tokens",
        "TTFT mean s",
        "p99",
    )
    say("16 replicas", columns, cells, 2)
    figure = new_figure(8.0, 3.2)
    for axes, name, what in zip(
        figure.subplots(1, 2),
        ("lost", "wasted_tokens"),
        ("answers lost", "tokens computed for nothing"),
        strict=True,
    ):
        _bars(axes, [[found[spec, r][name] for spec in DEATHS] for r in (False, True)], ["no resume", "resume"])
        axes.set_xticks(range(len(DEATHS)), DEATHS, fontsize=7, rotation=15)
        axes.set_title(what, fontsize=10)
        axes.legend(fontsize=8)
    return figure


# A day -------------------------------------------------------------------------------------------

OBJECTIVE = ScalingObjective(tpot_s=0.025, backlog_s=1.0, least=1, most=12)
TTFT_LIMIT_S = 3.0
SPEED = 0.25  # of replicas, so that one service's load needs several


def day_trace() -> FleetTrace:
    """Return a day of Azure's hour, few requests by night and many by day."""
    hour = read_fleet_trace(DATA / "azure2023_conv.csv.gz", "azure")
    hours = []
    for number in range(24):
        time_h = number + hour.arrival_s / HOUR_S
        share = 0.1 + 0.9 * np.sin(np.pi * ((time_h - 3) % 24) / 24) ** 4  # most at 15 h
        part = hour.only(np.flatnonzero(np.random.default_rng(number).random(len(hour)) < share))
        hours.append(replace(part, arrival_s=part.arrival_s + number * HOUR_S))
    times, prompts, outputs = (
        np.concatenate([getattr(h, n) for h in hours]) for n in ("arrival_s", "prompt_lens", "output_lens")
    )
    return FleetTrace(times, prompts, outputs, [()] * len(times))


def day() -> Any:
    """Follow a day with the scaler and with fixed sizes; draw load and replicas."""
    trace, cells, drawn = day_trace(), [], None
    setup = FleetSetup.of(OBJECTIVE.most, kind(), trace, speeds=(SPEED,))
    with progress("day") as update:
        for number, size in enumerate((0, 5, 8, 12)):
            update(number, 4)
            options = FleetOptions(objective=None if size else OBJECTIVE)
            sized = replace(setup, num_replicas=size or OBJECTIVE.most)
            result = sized.run(trace, policy_named("seconds"), options)
            drawn = drawn or result
            f = figures(result)
            late = 1 - np.mean(result.ends.first_s - trace.arrival_s <= TTFT_LIMIT_S)
            cells.append(
                (
                    f"{size} replicas" if size else "scaler",
                    f"{f['replica_hours']:.0f}",
                    f"{f['ttft_mean_s']:.2f}",
                    f"{f['ttft_p99_s']:.2f}",
                    f"{late:.2%}",
                    f"{1e3 * f['tpot_mean_s']:.1f}",
                    str(f["moved"]),
                )
            )
    columns = ("size", "replica hours", "TTFT mean s", "p99", f"above {TTFT_LIMIT_S:g} s", "TPOT ms", "moved")
    say(f"a day of {len(trace)} requests", columns, cells)
    assert drawn is not None
    return _draw_day(trace, drawn)


def _draw_day(trace: FleetTrace, result: FleetResult) -> Any:
    figure = new_figure(8.0, 3.0)
    axes = figure.subplots()
    minutes = np.bincount((trace.arrival_s / 60).astype(int)) / 60
    axes.plot(np.arange(len(minutes)) / 60, minutes, linewidth=0.5, color="tab:gray", label="requests a second")
    axes.set_xlabel("hour of the day")
    axes.set_ylabel("requests a second")
    other = axes.twinx()
    times, sizes = zip(*result.tally.sizes, strict=True)
    other.step(np.array(times) / HOUR_S, sizes, where="post", linewidth=1.0, color="tab:blue")
    other.set_ylabel("replicas", color="tab:blue")
    other.set_ylim(0)
    return figure


# Tails -------------------------------------------------------------------------------------------

ANSWERS, REPLICAS = 2048, 16
PACKED = (0, 8, 16, 32)  # rows of a replica while others are freed; 0: none is


def tail_trace() -> FleetTrace:
    """Return a roll-out: all there from the start, with answers of very different lengths."""
    rng = np.random.default_rng(0)
    outputs = np.clip(rng.lognormal(np.log(600), 1.0, ANSWERS), 1, 16_384).astype(int)
    return FleetTrace(np.zeros(ANSWERS), np.full(ANSWERS, 512), outputs, [()] * ANSWERS)


def tails() -> Any:
    """Compare ends of a roll-out; draw the replicas that are held."""
    trace, cells = tail_trace(), []
    figure = new_figure(8.0, 3.0)
    for axes, policy in zip(figure.subplots(1, 2, sharey=True, sharex=True), ("off", "ours"), strict=True):
        setup = FleetSetup.of(REPLICAS, kind(policy), trace)
        for rows in PACKED:
            result = setup.run(trace, policy_named("least"), FleetOptions(pack_rows=rows))
            tally = result.tally
            busy_h = float(tally.on_s.sum() if rows else tally.idle_from_s.sum()) / HOUR_S
            cells.append(
                (
                    policy,
                    f"packed to {rows} rows" if rows else "spread",
                    f"{tally.ended_s:.0f}",
                    f"{tally.on_s.sum() / HOUR_S:.2f}",
                    f"{busy_h:.2f}",
                    str(tally.moved),
                    f"{tally.wasted / trace.output_lens.sum():.1%}",
                )
            )
            _draw_sizes(axes, result, rows)
        axes.set_title("no drafts" if policy == "off" else "auto", fontsize=10)
        axes.set_xlabel("s")
    columns = ("policy", "tail", "end s", "replica hours", "if freed when empty", "moved", "computed again")
    say(f"{ANSWERS} answers on {REPLICAS} replicas", columns, cells, 2)
    figure.axes[0].set_ylabel("replicas held")
    figure.axes[0].legend(fontsize=7)
    return figure


def _draw_sizes(axes: Any, result: FleetResult, rows: int) -> None:
    """Draw the replicas that are held; unpacked ones until their last row ends."""
    if rows:
        times, sizes = zip(*result.tally.sizes[REPLICAS - 1 :], (result.tally.ended_s, 0), strict=True)
    else:
        times = (0.0, *np.sort(result.tally.idle_from_s).tolist())
        sizes = tuple(range(REPLICAS, -1, -1))
    axes.step(times, sizes, where="post", label=f"packed to {rows} rows" if rows else "freed when empty")


STUDIES: dict[str, Callable[[], Any]] = {"routers": routers, "deaths": deaths, "day": day, "tails": tails}


def main() -> int:
    """Run a study."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--plot", metavar="FILE", help="draw a picture there")
    args: Namespace = parser.parse_args()
    figure = STUDIES[args.study]()
    if args.plot:
        figure.savefig(args.plot, dpi=DPI)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
