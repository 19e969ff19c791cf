"""Roll-outs as reinforcement learning has them: many requests of very different lengths, all at once.

Policies take turns of a second until each has answered all; of a policy only its own turns count.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.bench.compare.players import Player, race
from paceline.bench.report import PLAIN
from paceline.bench.run import Question
from paceline.bench.statistics import median_interval, paired_ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.compare.arena import Arena
    from paceline.bench.compare.results import Results
    from paceline.bench.prompts import Prompt
    from paceline.core.params import SamplingParams

    Json = dict[str, Any]
    Tell = Callable[[int, int], None]

TAIL = 1.0  # spread of the logs of the lengths
MEDIANS = 16  # that the longest answer may have: of 64 it is cut once in six times, and what is cut is no tail
SHORTEST = 4  # tokens of an answer


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """What is compared."""

    arena: Arena
    results: Results
    prompts: Sequence[Prompt]
    params: SamplingParams  # no answer is longer than its `max_tokens`, `MEDIANS` medians
    policies: tuple[str, ...]  # plain decoding first, `auto` last
    requests: int = 64
    repeat: int = 3

    def run(self, tell: Tell) -> None:
        """Run what is not recorded yet, policies in turns."""
        for repeat in range(self.repeat):
            self.results.once({"repeat": repeat}, self._run)
            tell(repeat + 1, self.repeat)

    def _run(self) -> Json:
        asked, engines = self.questions(), {name: self.arena.engine(name) for name in self.policies}
        for engine in engines.values():
            engine.forget()
        players = {name: Player(engine, asked, self.requests) for name, engine in engines.items()}
        race(players)
        return {
            "seconds": {name: player.seconds for name, player in players.items()},
            "output_tokens": {name: player.tokens for name, player in players.items()},
        }

    def questions(self) -> list[Question]:
        """Return the requests; how long each answer is does not depend on what it says."""
        draw = random.Random(self.arena.seed)  # noqa: S311 (a load, not a secret)
        asked = self.arena.ask(self.prompts, self.requests, replace(self.params, ignore_eos=True))
        return [Question(q.prompt, replace(q.request, params=self._params(draw, q))) for q in asked]

    def _params(self, draw: random.Random, question: Question) -> SamplingParams:
        most = question.request.params.max_tokens
        length = round(most / MEDIANS * draw.lognormvariate(0.0, TAIL))
        return replace(question.request.params, max_tokens=min(max(length, SHORTEST), most))

    def lines(self) -> list[Json]:
        """Return the seconds of each policy, and those seconds against plain decoding's and the best static one's.

        Ratios are of one repeat, then medians; below 1 is faster. The best has the lowest median of seconds.
        """
        found = {name: [r["seconds"][name] for r in self.results.runs] for name in self.policies}
        by_hand = self.policies[:-1]
        best = min(by_hand[1:] or by_hand, key=lambda name: median(found[name]))
        return [
            {
                "policy": name,
                "seconds": median(own),
                "to_off": median_interval(paired_ratios(own, found[PLAIN])),
                "to_best": median_interval(paired_ratios(own, found[best])),
            }
            for name, own in found.items()
        ]
