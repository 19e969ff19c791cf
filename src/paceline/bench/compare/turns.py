"""Two groups in turn against all rows together, on equal cores and on fewer, at equal requests in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.bench.compare.arena import automatic, measure, static
from paceline.bench.compare.arms import ALL, APART, CHOSEN, SHARED, TURNS
from paceline.bench.statistics import median_interval, paired_ratios
from paceline.draft.options import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.bench.compare.arms import Arm
    from paceline.bench.compare.results import Results
    from paceline.bench.prompts import Prompt
    from paceline.core.params import SamplingParams

    Json = dict[str, Any]
    Tell = Callable[[int, int], None]

SIZES = (2, 8, 32)
KEPT = ("output_tokens_per_s", "wall_s", "output_tokens", "acceptance_length", "k_histogram", "in_turns")
KEPT_MS = ("draft_ms", "target_ms", "host_ms")
ROUNDS = 2  # questions for each request in flight, at least
SLACK = 0.03  # by which `auto` may be behind the better loop


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """What is compared."""

    arms: Mapping[str, Arm]
    results: Results
    prompts: Sequence[Prompt]
    params: SamplingParams
    drafters: tuple[str, ...]  # without k
    k: int | None = None  # None: the controller's choice, in every arm
    sizes: tuple[int, ...] = SIZES
    limit: int = 16  # questions of a run at least
    repeat: int = 5

    def run(self, tell: Tell) -> list[Json]:
        """Measure each cell, arms in turns, and return a line of the table for each cell and arm."""
        total, done = len(self.drafters) * len(self.sizes) * self.repeat * len(self.arms), 0
        for drafter in self.drafters:
            for arm in self.arms.values():
                arm.arena.keep((self.draft_of(arm.name, drafter),))
            for size, repeat in ((size, repeat) for size in self.sizes for repeat in range(self.repeat)):
                for name in self.arms:
                    key = {"draft": drafter, "size": size, "repeat": repeat, "arm": name}
                    self.results.once(key, partial(self._measure, name, drafter, size))
                    done += 1
                    tell(done, total)
        return [line for drafter in self.drafters for size in self.sizes for line in self.lines(drafter, size)]

    def draft_of(self, arm: str, drafter: str) -> str:
        """Return the `--draft` of an arm: `auto` has no choice of loops where K is fixed."""
        return automatic((drafter,)) if self.k is None or arm == CHOSEN else static((drafter,), (self.k,))[0]

    def _measure(self, name: str, drafter: str, size: int) -> Json:
        arm = self.arms[name]
        asked = arm.arena.ask(self.prompts, max(self.limit, ROUNDS * size), self.params)
        found = arm.use(self.draft_of(name, drafter), partial(measure, name=name, asked=asked, size=size))
        return {figure: found[figure] for figure in (*KEPT, *KEPT_MS)}

    def lines(self, drafter: str, size: int) -> list[Json]:
        """Return what is known of each arm in a cell: its median rate, and paired ratios with their interval.

        `to_better`: against the better loop on the same cores as `auto`, serial or in turns.
        """
        runs = [r for r in self.results.runs if r["draft"] == drafter and r["size"] == size]
        own = {name: [r for r in runs if r["arm"] == name] for name in self.arms}
        rates = {name: [r["output_tokens_per_s"] for r in found] for name, found in own.items()}
        better = max((APART, TURNS), key=lambda name: median(rates[name]))
        return [
            {
                "draft": drafter,
                "size": size,
                "arm": name,
                "tokens_per_s": median(rates[name]),
                "in_turns": median(r["in_turns"] for r in own[name]),
                **{
                    title: median_interval(paired_ratios(rates[name], rates[base]))
                    for title, base in (("to_shared", SHARED), ("to_all", ALL), ("to_better", better))
                },
            }
            for name in self.arms
        ]


def remarks(lines: Sequence[Json]) -> list[str]:
    """Return, in words, where turns lose, and where `auto` is behind the better loop."""
    told = [
        f'{TURNS} loses to "{base}" at {_cells(lines, TURNS, figure, 1.0) or "none of them"}'
        for base, figure in ((SHARED, "to_shared"), (APART, "to_better"), (ALL, "to_all"))
    ]
    behind = _cells(lines, CHOSEN, "to_better", 1.0 - SLACK)
    return [*told, f"{AUTO} is more than {SLACK:.0%} behind the better loop at {behind or 'none of them'}"]


def _cells(lines: Sequence[Json], arm: str, figure: str, least: float) -> str:
    """Return the cells in which an arm's ratio is below a number."""
    found = [line for line in lines if line["arm"] == arm and line[figure]["median"] < least]
    return ", ".join(f"{x['draft']} x{x['size']} ({x[figure]['median']:.2f})" for x in found)
