"""Policies in turns of a second: a slow minute of the machine is everybody's."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.bench.run import Question
    from paceline.engine.engine import Engine

TURN_S = 1.0


class Player:
    """One policy's way through a phase."""

    def __init__(self, engine: Engine, asked: Sequence[Question], in_flight: int) -> None:
        self.engine, self._waiting, self._in_flight, self._open = engine, deque(asked), in_flight, 0

    @property
    def done(self) -> bool:
        """Whether every question is answered."""
        return not self._waiting and not self._open

    def play(self, seconds: float) -> tuple[float, int]:
        """Go on for a turn; return its seconds and tokens."""
        start_s, tokens = perf_counter(), 0
        while not self.done and perf_counter() - start_s < seconds:
            while self._waiting and self._open < self._in_flight:
                self.engine.add(self._waiting.popleft().request)
                self._open += 1
            for outcome in self.engine.step():
                tokens += len(outcome.token_ids)
                self._open -= outcome.finish_reason is not None
        return perf_counter() - start_s, tokens


def rates(engines: Mapping[str, Engine], asked: Sequence[Question], in_flight: int) -> dict[str, float]:
    """Return the tokens per second of each policy on the same questions, all in turns, from a cold start.

    Raises `PacelineError` if a drafter failed, as one that is given up decodes plainly from then on.
    """
    for engine in engines.values():
        warm_up = Player(engine, asked[:in_flight], in_flight)  # `auto` meets this size
        while not warm_up.done:
            warm_up.play(TURN_S)
        engine.forget()
    players = {name: Player(engine, asked, in_flight) for name, engine in engines.items()}
    spent_s, tokens = dict.fromkeys(players, 0.0), dict.fromkeys(players, 0)
    while not all(player.done for player in players.values()):
        for name, player in players.items():
            if not player.done:
                turn_s, written = player.play(TURN_S)
                spent_s[name] += turn_s
                tokens[name] += written
    for name, engine in engines.items():
        if engine.stats().drafter_failures:
            raise PacelineError(f"{name}: a drafter failed; the log says why, and nothing is recorded")
    return {name: tokens[name] / spent_s[name] for name in players}
