"""Roll-outs of reinforcement learning: many requests of very different lengths, all at once.

Policies alternate in slices of a second until each has answered all; only a policy's own slices count for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.bench.interleave import Question, SlicedRun, round_robin
from paceline.bench.report import PLAIN
from paceline.bench.statistics import median_interval, paired_ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.prompt_file import Prompt
    from paceline.bench.scenarios.engine_pool import EnginePool
    from paceline.bench.scenarios.result_file import ResultFile
    from paceline.core.params import SamplingParams

    Json = dict[str, Any]
    OnProgress = Callable[[int, int], None]  # (done, total)

LOG_DEVIATION = 1.0  # standard deviation of the logarithm of the lengths
# The longest answer allowed, in medians: so many that with 64 requests only every sixth run has a cut answer.
MAX_MEDIANS = 16
MIN_TOKENS = 4  # of an answer


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Times each policy until its last answer."""

    pool: EnginePool
    results: ResultFile
    prompts: Sequence[Prompt]
    params: SamplingParams  # `max_tokens` is the longest answer, `MAX_MEDIANS` medians
    policies: tuple[str, ...]  # plain decoding first, `auto` last
    requests: int = 64
    repeat: int = 3

    def run(self, on_progress: OnProgress) -> None:
        """Make the runs that are missing."""
        for repeat in range(self.repeat):
            self.results.once({"repeat": repeat}, self._run)
            on_progress(repeat + 1, self.repeat)

    def _run(self) -> Json:
        questions = self.questions()
        engines = {name: self.pool.engine(name) for name in self.policies}
        for engine in engines.values():
            engine.forget()
        runs = {name: SlicedRun(engine, questions, self.requests) for name, engine in engines.items()}
        round_robin(runs)
        return {
            "seconds": {name: run.seconds for name, run in runs.items()},
            "output_tokens": {name: run.tokens for name, run in runs.items()},
        }

    def questions(self) -> list[Question]:
        """Return the requests, each with a length drawn beforehand, whatever its text says."""
        draw = random.Random(self.pool.seed)  # noqa: S311 (load, not secrets)
        chosen = self.pool.choose(self.prompts, self.requests, replace(self.params, ignore_eos=True))
        return [Question(q.prompt, replace(q.request, params=self._params(draw, q))) for q in chosen]

    def _params(self, draw: random.Random, question: Question) -> SamplingParams:
        max_tokens = question.request.params.max_tokens
        length = round(max_tokens / MAX_MEDIANS * draw.lognormvariate(0.0, LOG_DEVIATION))
        return replace(question.request.params, max_tokens=min(max(length, MIN_TOKENS), max_tokens))

    def rows(self) -> list[Json]:
        """Return each policy's seconds and its ratios to plain decoding and the best fixed policy.

        Ratios are taken within a repeat, then their median; below 1 is faster. The best has the lowest median of
        seconds.
        """
        found = {name: [r["seconds"][name] for r in self.results.runs] for name in self.policies}
        fixed = self.policies[:-1]
        best = min(fixed[1:] or fixed, key=lambda name: median(found[name]))
        return [
            {
                "policy": name,
                "seconds": median(own),
                "to_off": median_interval(paired_ratios(own, found[PLAIN])),
                "to_best": median_interval(paired_ratios(own, found[best])),
            }
            for name, own in found.items()
        ]
