"""A day in the life: load that rises and falls, tasks that change, all policies in turns of a second.

Turns are short, so that a slow hour of the machine is everybody's; a calibration loop before and after each tells
in which rounds it stood still.

Phases are compared by tokens per second. Windows of some seconds are too short for that: prompts are read in
bursts, and who reads a second earlier or later has its tokens in another window. So there the tokens of prompts
count too, at what one takes plain decoding in that phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.bench.compare.players import Player
from paceline.bench.report import PLAIN
from paceline.bench.run import TURN_S
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.bench.compare.arena import Arena
    from paceline.bench.compare.results import Results
    from paceline.bench.prompts import Prompt
    from paceline.core.params import SamplingParams

    Json = dict[str, Any]
    Tell = Callable[[int, int], None]

TASKS: Mapping[str, tuple[str, ...]] = {  # categories of prompts
    "code": ("code_edit", "coding"),
    "chat": ("writing", "roleplay", "reasoning", "stem", "humanities", "extraction", "qa"),
    "summarisation": ("summarization",),
}
PHASES = "chat:1,code:4,summarisation:16,chat:64,code:64,summarisation:16,chat:4,code:1"
WINDOW_S = 5.0
STALLED = 1.5  # times as long as usual, of the calibration loop
LOOP = 100_000


@dataclass(frozen=True, slots=True)
class Phase:
    """A task and how many of its requests are in flight."""

    task: str
    in_flight: int


def phases(text: str) -> tuple[Phase, ...]:
    """Read `TASK:IN_FLIGHT[,...]`; a task is one of `TASKS` or a category. Raises `ConfigError`."""
    found = []
    for part in text.split(","):
        task, _, number = part.partition(":")
        if not task or not number.isdigit() or not 1 <= int(number) <= 1024:
            raise ConfigError(f"--phases {part!r}: write TASK:IN_FLIGHT, such as chat:16")
        found.append(Phase(task, int(number)))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Day:
    """What is compared."""

    arena: Arena
    results: Results
    prompts: Sequence[Prompt]
    params: SamplingParams
    policies: tuple[str, ...]  # plain decoding first, `auto` last
    phases: tuple[Phase, ...]
    rounds: int = 2  # questions for each request in flight
    least: int = 4  # questions of a phase

    def run(self, tell: Tell) -> None:
        """Run every phase that is not recorded yet."""
        for index, phase in enumerate(self.phases):
            key = {"phase": index, "task": phase.task, "in_flight": phase.in_flight}
            self.results.once(key, partial(self._play, phase))
            tell(index + 1, len(self.phases))

    def _play(self, phase: Phase) -> Json:
        own = [p for p in self.prompts if p.category in TASKS.get(phase.task, (phase.task,))]
        if not own:
            raise ConfigError(f"no prompt is of the task {phase.task!r}")
        asked = self.arena.ask(own, max(self.least, self.rounds * phase.in_flight), self.params)
        players = {name: Player(self.arena.engine(name), asked, phase.in_flight) for name in self.policies}
        turns: list[Json] = []
        while not all(player.done for player in players.values()):
            turns.append(_round(players))
        for name, player in players.items():
            player.leave(name)
        return {"turns": turns}

    # What came of it -----------------------------------------------------------------------------

    def table(self) -> list[Json]:
        """Return a line for each phase: tokens per second of each policy."""
        return [
            {"phase": f"{r['task']} x{r['in_flight']}"} | {name: _rate(r["turns"], name) for name in self.policies}
            for r in self.results.runs
        ]

    def verdict(self) -> Json:
        """Return what is known of each policy over all phases, and the windows of `auto`.

        Of a policy: the geometric mean and the worst of its phases' ratios to plain decoding, and the mean against
        that of the best static policy, one for the whole day.
        """
        table = self.table()
        found: Json = {}
        for name in self.policies:
            ratios = [line[name] / line[PLAIN] for line in table]
            found[name] = {"mean": geometric_mean(ratios), "worst_phase": min(ratios)}
        by_hand = self.policies[1:-1] or self.policies[:1]
        best = max(found[name]["mean"] for name in by_hand)
        for figures in found.values():
            figures["to_best"] = figures["mean"] / best
        calm, stalled = windows([r["turns"] for r in self.results.runs], self.policies[-1], PLAIN)
        return found | {"windows": calm, "windows_left_out": stalled}


def _round(players: Mapping[str, Player]) -> Json:
    """Let everybody play a turn; return each one's seconds, tokens written and tokens read of prompts.

    `full`: who had all its requests in flight. `machine_s`: the longest of the calibration loops around the turns.
    """
    loops, turns, full = [loop_s()], {}, []
    for name, player in players.items():
        if not player.done:
            read = player.prefilled_tokens
            turns[name] = [*player.play(TURN_S), player.prefilled_tokens - read]
            loops.append(loop_s())
            full += [name] * player.full
    return {"machine_s": max(loops), "full": full, **turns}


def windows(phases: Sequence[Sequence[Json]], name: str, twin: str) -> tuple[list[float], list[float]]:
    """Return the ratios of work per second in windows of some seconds: calm ones, and those with a stall.

    Only while both have all their requests in flight: who is faster is the first to run out of them.
    """
    usual_s = median(turn["machine_s"] for turns in phases for turn in turns)
    calm: list[float] = []
    stalled: list[float] = []
    for turns in phases:
        both = [t for t in turns if {name, twin} <= set(t["full"])]
        prices = _prices(both, twin)
        size = max(1, round(WINDOW_S / TURN_S))
        for start in range(0, len(both) - size + 1, size):
            window = both[start : start + size]
            slow = max(t["machine_s"] for t in window) > STALLED * usual_s
            ours, plain = (_work(window, player, prices) for player in (name, twin))
            (stalled if slow else calm).append(ours / max(plain, 1e-9))
    return calm, stalled


def _prices(turns: Sequence[Json], name: str) -> NDArray[float64]:
    """Return the seconds of a token written and of one read, as turns of a policy have them. [2]"""
    seconds, *tokens = np.array([turn[name] for turn in turns], float).reshape(-1, 3).T
    prices: NDArray[float64] = np.linalg.lstsq(np.stack(tokens, axis=1), seconds)[0]
    return prices.clip(0)


def _work(turns: Sequence[Json], name: str, prices: NDArray[float64]) -> float:
    """Return what a policy did, by its prices, in each second."""
    seconds, *tokens = np.sum([turn[name] for turn in turns], axis=0)
    return float(prices @ tokens / max(seconds, 1e-9))


def _rate(turns: Sequence[Json], name: str) -> float:
    """Return the tokens that a policy wrote in each second."""
    own = [turn[name] for turn in turns if name in turn]
    return float(sum(tokens for _, tokens, _ in own) / max(sum(seconds for seconds, *_ in own), 1e-9))


def loop_s() -> float:
    """Return the seconds of a loop that is always the same."""
    start_s = perf_counter()
    for _ in range(LOOP):
        pass
    return perf_counter() - start_s
