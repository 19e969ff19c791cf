"""`auto` against the best fixed drafter and k, at each number of requests in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.bench.interleave import measure_rates
from paceline.bench.report import PLAIN
from paceline.bench.scenarios.engine_pool import PLAIN_CONTROL, auto_policy, fixed_policies
from paceline.bench.statistics import median_interval, paired_ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.prompt_file import Prompt
    from paceline.bench.scenarios.engine_pool import EnginePool
    from paceline.bench.scenarios.result_file import ResultFile
    from paceline.core.params import SamplingParams

    Json = dict[str, Any]
    OnProgress = Callable[[int, int], None]  # (done, total)

FINALISTS = 2  # fixed policies that are measured again
# Least questions per request in flight. With few, much of a run is its end, where fewer and fewer are in flight.
SCREENING_ROUNDS, FINAL_ROUNDS = 2, 4


@dataclass(frozen=True, slots=True, eq=False)
class BatchSweep:
    """Screens all fixed policies at each size, then measures the best again beside `auto`."""

    pool: EnginePool
    results: ResultFile
    prompts: Sequence[Prompt]
    params: SamplingParams
    drafters: tuple[str, ...]
    sizes: tuple[int, ...]
    screened: int  # questions of a screening run, at least
    limit: int  # questions of a final run, at least
    repeat: int

    @property
    def auto(self) -> str:
        """The policy that is judged."""
        return auto_policy(self.drafters)

    def run(self, on_progress: OnProgress) -> list[Json]:
        """Make the missing runs; return a table row for each size and finalist."""
        policies = fixed_policies(self.drafters)
        total, done = (len(policies) + self.repeat) * len(self.sizes), 0
        for policy in policies:
            self.pool.keep()  # so that plain decoding's engine is as new as the policy's
            for size in self.sizes:
                key = {"stage": "screen", "size": size, "of": policy}
                count = max(self.screened, SCREENING_ROUNDS * size)
                self.results.once(key, partial(self._measure, (PLAIN, policy), size, count))
                done += 1
                on_progress(done, total)
        for size in self.sizes:
            names = (PLAIN, *self._finalists(size), self.auto, PLAIN_CONTROL)
            self.pool.keep()
            for repeat in range(self.repeat):
                key = {"stage": "final", "size": size, "repeat": repeat}
                self.results.once(key, partial(self._measure, names, size, max(self.limit, FINAL_ROUNDS * size)))
                done += 1
                on_progress(done, total)
        return [row for size in self.sizes for row in self.rows(size)]

    def _measure(self, names: Sequence[str], size: int, count: int) -> Json:
        """Measure policies in alternating slices on `count` questions."""
        questions = self.pool.choose(self.prompts, count, self.params)
        engines = {name: self.pool.engine(name) for name in names}
        return {"tokens_per_s": measure_rates(engines, questions, size)}

    def gains(self, size: int) -> dict[str, float]:
        """Return the screened speed-up of each fixed policy over plain decoding beside it."""
        found = [r for r in self.results.runs if r["stage"] == "screen" and r["size"] == size]
        return {r["of"]: r["tokens_per_s"][r["of"]] / r["tokens_per_s"][PLAIN] for r in found}

    def _finalists(self, size: int) -> list[str]:
        gains = self.gains(size)
        return sorted(gains, key=lambda policy: -gains[policy])[:FINALISTS]

    def rates(self, size: int) -> dict[str, list[float]]:
        """Return the tokens per second of each finalist, by repeat."""
        found: dict[str, list[float]] = {}
        for r in self.results.runs:
            if r["stage"] == "final" and r["size"] == size:
                for name, rate in r["tokens_per_s"].items():
                    found.setdefault(name, []).append(rate)
        return found

    def rows(self, size: int) -> list[Json]:
        """Return each finalist's median rate, and its paired ratios with their intervals."""
        rates = self.rates(size)
        fixed = [name for name in rates if name not in (PLAIN, PLAIN_CONTROL, self.auto)]
        best = max((*fixed, PLAIN), key=lambda name: median_interval(rates[name])["median"] or 0.0)
        return [
            {
                "size": size,
                "policy": name,
                "tokens_per_s": median_interval(own)["median"],
                "to_off": median_interval(paired_ratios(own, rates[PLAIN])),
                "to_best": median_interval(paired_ratios(own, rates[best])),
            }
            for name, own in rates.items()
        ]
