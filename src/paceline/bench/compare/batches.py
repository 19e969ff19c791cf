"""`auto` against the best that could be chosen by hand, at each number of requests in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.bench.compare.arena import TWIN, automatic, static
from paceline.bench.compare.players import rates
from paceline.bench.report import PLAIN
from paceline.bench.statistics import median_interval, paired_ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.compare.arena import Arena
    from paceline.bench.compare.results import Results
    from paceline.bench.prompts import Prompt
    from paceline.core.params import SamplingParams

    Json = dict[str, Any]
    Tell = Callable[[int, int], None]

SIZES = (1, 2, 4, 8, 16, 32, 64)
FINALISTS = 2  # static policies that are measured again
SCREENED, ROUNDS = 2, 4  # questions for each request in flight, at least: the last ones are ever fewer


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """What is compared."""

    arena: Arena
    results: Results
    prompts: Sequence[Prompt]
    params: SamplingParams
    drafters: tuple[str, ...]
    sizes: tuple[int, ...] = SIZES
    screened: int = 4  # questions of a screening run, at least
    limit: int = 16  # of a final run, at least
    repeat: int = 5

    @property
    def auto(self) -> str:
        """The policy that is judged."""
        return automatic(self.drafters)

    def run(self, tell: Tell) -> list[Json]:
        """Screen, measure again, and return a line of the table for each size and finalist."""
        policies = static(self.drafters)
        total, done = (len(policies) + self.repeat) * len(self.sizes), 0
        for policy in policies:
            self.arena.keep()  # nobody's engine is older than another's
            for size in self.sizes:
                key = {"stage": "screen", "size": size, "of": policy}
                self.results.once(
                    key, partial(self._measure, (PLAIN, policy), size, max(self.screened, SCREENED * size))
                )
                done += 1
                tell(done, total)
        for size in self.sizes:
            names = (PLAIN, *self._best(size), self.auto, TWIN)
            self.arena.keep()
            for repeat in range(self.repeat):
                key = {"stage": "final", "size": size, "repeat": repeat}
                self.results.once(key, partial(self._measure, names, size, max(self.limit, ROUNDS * size)))
                done += 1
                tell(done, total)
        return [line for size in self.sizes for line in self.lines(size)]

    def _measure(self, names: Sequence[str], size: int, count: int) -> Json:
        """Measure policies in turns on so many questions."""
        asked = self.arena.ask(self.prompts, count, self.params)
        return {"tokens_per_s": rates({name: self.arena.engine(name) for name in names}, asked, size)}

    def gains(self, size: int) -> dict[str, float]:
        """Return what each static policy brought in the screening, against plain decoding beside it."""
        found = [r for r in self.results.runs if r["stage"] == "screen" and r["size"] == size]
        return {r["of"]: r["tokens_per_s"][r["of"]] / r["tokens_per_s"][PLAIN] for r in found}

    def _best(self, size: int) -> list[str]:
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

    def lines(self, size: int) -> list[Json]:
        """Return what is known of each finalist: its median rate, and paired ratios with their interval."""
        rates = self.rates(size)
        hand = [name for name in rates if name not in (PLAIN, TWIN, self.auto)]
        best = max((*hand, PLAIN), key=lambda name: median_interval(rates[name])["median"] or 0.0)
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
