"""A picture of `paceline timeline`: bars of each side, one loop above the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.bench.timeline import DRAFT, TARGET
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.bench.timeline import Span, Timeline

GROUPS = ("tab:blue", "tab:orange")
HOST = "0.45"
HEIGHT = 0.7  # of the room of a lane


def draw(timelines: Mapping[str, tuple[Timeline, int]], lanes: Sequence[str], turns: int, target: Path) -> None:
    """Draw some turns from the middle of each timeline, all over the same time.

    timelines: by title, with the number of groups that take turns, each of which has a colour. lanes: names of the
    target's, the drafter's and the host's. Raises `ConfigError` if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'paceline[plot]'") from None
    figure = Figure(figsize=(10, 1.9 * len(timelines)), layout="constrained")
    all_axes = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
    starts = {title: _middle(timeline, turns) for title, (timeline, _) in timelines.items()}
    length_s = max(end_s - start_s for start_s, end_s in starts.values())
    for axes, (title, (timeline, groups)) in zip(all_axes, timelines.items(), strict=True):
        _bars(axes, timeline, groups, starts[title][0])
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlim(0, 1e3 * length_s)
    all_axes[-1].set_xlabel("ms")
    figure.savefig(target, dpi=150)


def _middle(timeline: Timeline, turns: int) -> tuple[float, float]:
    """Return when some turns in the middle begin and end."""
    starts = [span.start_s for span in timeline.of(TARGET)]
    first = max(0, (len(starts) - 1 - turns) // 2)
    return starts[first], starts[min(first + turns, len(starts) - 1)]


def _bars(axes: Any, timeline: Timeline, groups: int, zero_s: float) -> None:
    """Draw the lanes. What drafters do beside a pass, or after it, is for the group whose pass comes next."""
    passes = timeline.of(TARGET)
    for index, span in enumerate(passes):
        axes.barh(0, 1e3 * span.length_s, HEIGHT, 1e3 * (span.start_s - zero_s), color=GROUPS[index % groups])
    for span in timeline.of(DRAFT):
        index = sum(p.start_s <= span.start_s for p in passes)
        axes.barh(1, 1e3 * span.length_s, HEIGHT, 1e3 * (span.start_s - zero_s), color=GROUPS[index % groups])
    host: list[Span] = timeline.host()
    axes.broken_barh(
        [(1e3 * (s.start_s - zero_s), 1e3 * s.length_s) for s in host], (2 - HEIGHT / 2, HEIGHT), color=HOST
    )
