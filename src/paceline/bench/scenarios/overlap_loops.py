"""Overlapped against serial loop on equal cores and on fewer, with equal requests in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.bench.interleave import round_robin, warm_run
from paceline.bench.measure import MS_PER_S
from paceline.bench.scenarios.core_sharing import ALL_CORES, AUTO_LOOP, OVERLAPPED, SEPARATE, SHARED
from paceline.bench.scenarios.engine_pool import auto_policy, fixed_policies
from paceline.bench.statistics import median_interval, paired_ratios
from paceline.draft.registry import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.bench.interleave import SlicedRun
    from paceline.bench.prompt_file import Prompt
    from paceline.bench.scenarios.core_sharing import CoreSharing
    from paceline.bench.scenarios.result_file import ResultFile
    from paceline.core.params import SamplingParams

    Json = dict[str, Any]
    OnProgress = Callable[[int, int], None]  # (done, total)

ROUNDS = 4  # least questions per request in flight, as at the end of a run fewer and fewer are in flight
SLACK = 0.03  # tolerated loss of `auto` against the better loop


@dataclass(frozen=True, slots=True, eq=False)
class OverlapComparison:
    """Measures every way to share the cores for each drafter and size."""

    sharings: Mapping[str, CoreSharing]
    results: ResultFile
    prompts: Sequence[Prompt]
    params: SamplingParams
    drafters: tuple[str, ...]  # without k
    k: int | None  # None: the controller chooses, in every way
    sizes: tuple[int, ...]
    limit: int  # questions of a run, at least
    repeat: int

    def run(self, on_progress: OnProgress) -> list[Json]:
        """Make the missing runs; return a table row for each drafter, size and way."""
        total, done = len(self.drafters) * len(self.sizes) * self.repeat, 0
        for drafter in self.drafters:
            for sharing in self.sharings.values():
                sharing.pool.keep((self.draft_of(sharing.name, drafter),))
            for size, repeat in ((size, repeat) for size in self.sizes for repeat in range(self.repeat)):
                key = {"draft": drafter, "size": size, "repeat": repeat}
                self.results.once(key, partial(self._measure, drafter, size))
                done += 1
                on_progress(done, total)
        return [row for drafter in self.drafters for size in self.sizes for row in self.rows(drafter, size)]

    def draft_of(self, sharing: str, drafter: str) -> str:
        """Return the `--draft` of a way. With a fixed k, `auto` could not choose loops."""
        if self.k is None or sharing == AUTO_LOOP:
            return auto_policy((drafter,))
        return fixed_policies((drafter,), (self.k,))[0]

    def _measure(self, drafter: str, size: int) -> Json:
        runs = {}
        for name, sharing in self.sharings.items():
            questions = sharing.pool.choose(self.prompts, max(self.limit, ROUNDS * size), self.params)
            engine = sharing.use(self.draft_of(name, drafter), lambda engine: engine)
            runs[name] = warm_run(engine, questions, size, sharing.worker)
        round_robin(runs)
        return {"sharings": {name: _figures(run) for name, run in runs.items()}}

    def rows(self, drafter: str, size: int) -> list[Json]:
        """Return each way's median rate in a cell, and its paired ratios with their intervals.

        `to_better` is against the better loop on the same cores as `auto`, serial or overlapped.
        """
        runs = [r for r in self.results.runs if r["draft"] == drafter and r["size"] == size]
        own = {name: [r["sharings"][name] for r in runs] for name in self.sharings}
        rates = {name: [r["output_tokens_per_s"] for r in found] for name, found in own.items()}
        better = max((SEPARATE, OVERLAPPED), key=lambda name: median(rates[name]))
        return [
            {
                "draft": drafter,
                "size": size,
                "sharing": name,
                "tokens_per_s": median(rates[name]),
                "overlapped_share": median(r["overlapped_share"] for r in own[name]),
                **{
                    title: median_interval(paired_ratios(rates[name], rates[base]))
                    for title, base in (("to_shared", SHARED), ("to_all", ALL_CORES), ("to_better", better))
                },
            }
            for name in self.sharings
        ]


def _figures(run: SlicedRun) -> Json:
    """Return the recorded figures of one way: seconds of its slices, means per step."""
    stats = run.stats
    steps, ms_per_step = max(stats.steps, 1), MS_PER_S / max(stats.steps, 1)
    return {
        "output_tokens_per_s": run.rate,
        "seconds": run.seconds,
        "output_tokens": run.tokens,
        "acceptance_length": stats.decoded_tokens / max(stats.decode_passes, 1),
        "k_histogram": list(stats.k_histogram),
        "overlapped_share": stats.overlapped_steps / steps,  # share of steps with one half of the rows
        "draft_ms": stats.draft_s * ms_per_step,
        "target_ms": stats.target_s * ms_per_step,
        "host_ms": stats.host_s * ms_per_step,
    }


def losses(rows: Sequence[Json]) -> list[str]:
    """Return sentences that say where overlap loses, and where `auto` is behind the better loop."""
    found = [
        f'{OVERLAPPED} loses to "{base}" at {_cells(rows, OVERLAPPED, figure, 1.0) or "none of them"}'
        for base, figure in ((SHARED, "to_shared"), (SEPARATE, "to_better"), (ALL_CORES, "to_all"))
    ]
    behind = _cells(rows, AUTO_LOOP, "to_better", 1.0 - SLACK)
    return [*found, f"{AUTO} is more than {SLACK:.0%} behind the better loop at {behind or 'none of them'}"]


def _cells(rows: Sequence[Json], sharing: str, figure: str, threshold: float) -> str:
    """Return the cells in which a way's ratio is below a threshold."""
    found = [row for row in rows if row["sharing"] == sharing and row[figure]["median"] < threshold]
    return ", ".join(f"{x['draft']} x{x['size']} ({x[figure]['median']:.2f})" for x in found)
