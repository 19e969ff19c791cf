"""Predict published gains of overlapped drafting from hardware data: `python -m tools.measure.overlap_roofline`.

MineDraft (arXiv 2603.18016) reports its throughput against serial speculation, which has half the requests in
flight and one device less. One constant is in no data sheet, the host time of a kernel launch: it is fitted on one
pair of models, and the other pairs are predicted. The same costs then give the gain at equal requests and equal
devices.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.serve.terminal.output_files import check_picture
from tools.entry import exit_status
from tools.measure.roofline import Hardware, ModelPair, ModelSizes, fit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TARGET = ModelSizes(64, 5120, 25600, 64, 8)  # Qwen3-32B
DRAFTERS = {  # Qwen3 sizes, and the reported gain over serial speculation
    "0.6B": (ModelSizes(28, 1024, 3072, 16, 8), 0.7032),
    "1.7B": (ModelSizes(28, 2048, 6144, 16, 8), 0.7568),
    "4B": (ModelSizes(36, 2560, 9728, 32, 8), 0.6564),
}
FITTED = "0.6B"
L40S = Hardware(bytes_per_s=864e9, operations_per_s=362e12)  # data sheet, 16 bit without sparsity
ROWS, KS = 16, range(1, 6)
MAX_LAUNCH_S = 40e-6


def pair_of(drafter: str, launch_s: float, host_s: float = 0.0) -> ModelPair:
    """Return a target on four devices and a drafter on one, both without graphs."""
    eager = replace(L40S, launch_s=launch_s)
    return ModelPair(TARGET, replace(eager, num_devices=4), DRAFTERS[drafter][0], eager, host_s)


def gain(pair: ModelPair, k: int, rows: int = ROWS) -> float:
    """Return the paper's figure: gain of overlap with twice the requests over serial speculation."""
    verify_s, draft_s = pair.verify_s(rows, k), pair.draft_s(rows, k)
    return (verify_s + draft_s) / max(verify_s, draft_s) - 1


def best(pair: ModelPair) -> float:
    """Return the largest gain over k."""
    return max(gain(pair, k) for k in KS)


def deepest(pair: ModelPair) -> float:
    """Return the gain at the largest k."""
    return gain(pair, KS[-1])


def fitted_launch_s(rule: Callable[[ModelPair], float], host_s: float = 0.0) -> float:
    """Return the time of a launch at which the fitted pair gains what was reported."""
    reported = DRAFTERS[FITTED][1]
    return fit(lambda launch_s: rule(pair_of(FITTED, launch_s, host_s)) - reported, MAX_LAUNCH_S)


def equal_terms(pair: ModelPair, k: int, in_flight: int = 2 * ROWS) -> float:
    """Return the gain of overlap at equal requests in flight and equal devices.

    The serial target has the drafter's device too, as if its work split evenly over one more.
    """
    own, half = pair.target_on, in_flight // 2
    wider = replace(pair, target_on=replace(own, num_devices=own.num_devices + pair.drafter_on.num_devices))
    serial_s = wider.verify_s(in_flight, k) + wider.draft_s(in_flight, k)
    return serial_s / (2 * max(pair.verify_s(half, k), pair.draft_s(half, k))) - 1


def captured(pair: ModelPair) -> ModelPair:
    """Return a pair whose drafter replays a captured graph."""
    return replace(pair, drafter_on=replace(pair.drafter_on, launch_s=0.0))


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, predict and print; with `--plot`, draw predictions over both constants."""
    parser = ArgumentParser(
        prog="python -m tools.measure.overlap_roofline", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw predictions over both constants")
    args = parser.parse_args(argv)
    check_picture("--plot", args.plot)
    console = Console()
    for name, rule in (("largest gain over k = 1 to 5", best), ("gain at k = 5", deepest)):
        launch_s = fitted_launch_s(rule)
        title = f"{name}; a launch takes {1e6 * launch_s:.1f} us"
        table = Table("drafter", "reported", "predicted", "off by", title=title)
        for drafter, (_, reported) in DRAFTERS.items():
            found = rule(pair_of(drafter, launch_s))
            table.add_row(drafter, f"{reported:+.1%}", f"{found:+.1%}", f"{100 * (found - reported):+.1f} points")
        console.print(table)
    table = Table("drafter", *(f"k = {k}" for k in KS), title="overlap at equal requests (32) and devices (5)")
    for drafter in DRAFTERS:
        pair = pair_of(drafter, fitted_launch_s(best))
        for how, one in ((f"{drafter} eager", pair), (f"{drafter} captured", captured(pair))):
            table.add_row(how, *(f"{equal_terms(one, k):+.1%}" for k in KS))
    console.print(table)
    if args.plot:
        _plot(Path(args.plot))
    return 0


def _plot(path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    launches_us = np.linspace(1, 25, 97)
    for drafter, (_, reported) in DRAFTERS.items():
        gains = [100 * best(pair_of(drafter, 1e-6 * us)) for us in launches_us]
        (line,) = axes[0].plot(launches_us, gains, label=f"{drafter}, {100 * reported:.1f} reported")
        axes[0].axhline(100 * reported, color=line.get_color(), linewidth=0.7, linestyle=":")
        hosts_ms = np.linspace(0, 10, 41)
        refitted = [100 * best(pair_of(drafter, fitted_launch_s(best, 1e-3 * ms), 1e-3 * ms)) for ms in hosts_ms]
        axes[1].plot(hosts_ms, refitted, color=line.get_color())
        axes[1].axhline(100 * reported, color=line.get_color(), linewidth=0.7, linestyle=":")
    axes[0].set(xlabel="host's time for a launch, us", ylabel="gain over serial speculation, %")
    axes[1].set(xlabel="host's time for a step, ms; launch fitted anew")
    axes[0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(exit_status(main))
