"""Two groups in turn against all rows together, on equal cores and on fewer, at equal requests in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.bench.compare.arena import automatic, static
from paceline.bench.compare.arms import ALL, APART, CHOSEN, SHARED, TURNS
from paceline.bench.compare.players import race, warm
from paceline.bench.measure import MS_PER_S
from paceline.bench.statistics import median_interval, paired_ratios
from paceline.draft.registry import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.bench.compare.arms import Arm
    from paceline.bench.compare.players import Player
    from paceline.bench.compare.results import Results
    from paceline.bench.prompts import Prompt
    from paceline.core.params import SamplingParams

    Json = dict[str, Any]
    Tell = Callable[[int, int], None]

SIZES = (2, 8, 32)
ROUNDS = 4  # questions for each request in flight, at least: the last ones are ever fewer
SLACK = 0.03  # by which `auto` may be behind the better loop


@dataclass(frozen=True, slots=True, eq=False)
class OverlapComparison:
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
        """Measure each cell, arms in turns of a second, and return a line of the table for each cell and arm."""
        total, done = len(self.drafters) * len(self.sizes) * self.repeat, 0
        for drafter in self.drafters:
            for arm in self.arms.values():
                arm.arena.keep((self.draft_of(arm.name, drafter),))
            for size, repeat in ((size, repeat) for size in self.sizes for repeat in range(self.repeat)):
                key = {"draft": drafter, "size": size, "repeat": repeat}
                self.results.once(key, partial(self._measure, drafter, size))
                done += 1
                tell(done, total)
        return [line for drafter in self.drafters for size in self.sizes for line in self.lines(drafter, size)]

    def draft_of(self, arm: str, drafter: str) -> str:
        """Return the `--draft` of an arm: `auto` has no choice of loops where K is fixed."""
        return automatic((drafter,)) if self.k is None or arm == CHOSEN else static((drafter,), (self.k,))[0]

    def _measure(self, drafter: str, size: int) -> Json:
        players = {}
        for name, arm in self.arms.items():
            asked = arm.arena.ask(self.prompts, max(self.limit, ROUNDS * size), self.params)
            engine = arm.use(self.draft_of(name, drafter), lambda engine: engine)
            players[name] = warm(engine, asked, size, worker=arm.worker)
        race(players)
        return {"arms": {name: _figures(player) for name, player in players.items()}}

    def lines(self, drafter: str, size: int) -> list[Json]:
        """Return what is known of each arm in a cell: its median rate, and paired ratios with their interval.

        `to_better`: against the better loop on the same cores as `auto`, serial or in turns.
        """
        runs = [r for r in self.results.runs if r["draft"] == drafter and r["size"] == size]
        own = {name: [r["arms"][name] for r in runs] for name in self.arms}
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


def _figures(player: Player) -> Json:
    """Return what is kept of an arm: its own seconds, and the means of its steps."""
    stats = player.stats
    steps, ms_per_step = max(stats.steps, 1), MS_PER_S / max(stats.steps, 1)
    return {
        "output_tokens_per_s": player.rate,
        "seconds": player.seconds,
        "output_tokens": player.tokens,
        "acceptance_length": stats.decoded_tokens / max(stats.decode_passes, 1),
        "k_histogram": list(stats.k_histogram),
        "in_turns": stats.overlapped_steps / steps,  # share of steps with one group of two
        "draft_ms": stats.draft_s * ms_per_step,
        "target_ms": stats.target_s * ms_per_step,
        "host_ms": stats.host_s * ms_per_step,
    }


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
