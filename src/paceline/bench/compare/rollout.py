"""Roll-outs as reinforcement learning has them: many requests of very different lengths, all at once."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.bench.compare.arena import draft_of
from paceline.bench.report import PLAIN
from paceline.bench.run import Question, ask
from paceline.bench.statistics import median_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.compare.arena import Arena
    from paceline.bench.compare.results import Results
    from paceline.bench.prompts import Prompt
    from paceline.core.params import SamplingParams

    Json = dict[str, Any]
    Tell = Callable[[int, int], None]

TAIL = 1.0  # spread of the logs of the lengths
SHORTEST = 4  # tokens of an answer


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """What is compared."""

    arena: Arena
    results: Results
    prompts: Sequence[Prompt]
    params: SamplingParams  # the longest answers have its `max_tokens`
    policies: tuple[str, ...]  # plain decoding first
    requests: int = 64
    repeat: int = 3

    def run(self, tell: Tell) -> None:
        """Run what is not recorded yet, policies in turns."""
        total = self.repeat * len(self.policies)
        for number in range(total):
            repeat, index = divmod(number, len(self.policies))
            name = self.policies[index]
            self.results.once({"repeat": repeat, "policy": name}, partial(self._run, name))
            tell(number + 1, total)

    def _run(self, name: str) -> Json:
        engine, asked = self.arena.engine(draft_of(name)), self.questions()
        engine.forget()
        start_s = perf_counter()
        answers = ask(engine, asked, self.requests)
        return {"wall_s": perf_counter() - start_s, "output_tokens": sum(a.output_tokens for a in answers)}

    def questions(self) -> list[Question]:
        """Return the requests; how long each answer is does not depend on what it says."""
        draw = random.Random(self.arena.seed)  # noqa: S311 (a load, not a secret)
        asked = self.arena.ask(self.prompts, self.requests, replace(self.params, ignore_eos=True))
        return [Question(q.prompt, replace(q.request, params=self._params(draw, q))) for q in asked]

    def _params(self, draw: random.Random, question: Question) -> SamplingParams:
        most = question.request.params.max_tokens
        length = round(most / 4 * draw.lognormvariate(0.0, TAIL))
        return replace(question.request.params, max_tokens=min(max(length, SHORTEST), most))

    def lines(self) -> list[Json]:
        """Return the seconds of each policy, and how many times as fast as plain decoding it was."""
        walls = {name: [r["wall_s"] for r in self.results.runs if r["policy"] == name] for name in self.policies}
        return [
            {
                "policy": name,
                "wall_s": median_interval(own)["median"],
                "speedup": median_interval([p / w for p, w in zip(walls[PLAIN], own, strict=True)]),
            }
            for name, own in walls.items()
        ]
