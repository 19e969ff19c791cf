"""Policies in turns of a second: a slow minute of the machine is everybody's."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from paceline.bench.run import TURN_S
from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.backend.pending import PassThread
    from paceline.bench.run import Question
    from paceline.engine.engine import Engine
    from paceline.engine.stats import Stats

T = TypeVar("T")


class Player:
    """One policy's way through some questions, a turn at a time."""

    def __init__(
        self,
        engine: Engine,
        asked: Sequence[Question],
        in_flight: int,
        worker: PassThread | None = None,
    ) -> None:
        """worker: where the engine lives, if that is a thread of its own."""
        self.engine, self._waiting, self._in_flight = engine, deque(asked), in_flight
        self._worker = worker
        self._open: set[str] = set()
        self.seconds, self.tokens = 0.0, 0  # of its turns
        self._before = self._after = engine.stats()

    @property
    def done(self) -> bool:
        """Whether all are answered."""
        return not self._waiting and not self._open

    @property
    def full(self) -> bool:
        """Whether as many are in flight as there were to be, or will be with the next step."""
        return bool(self._waiting) or len(self._open) >= self._in_flight

    @property
    def rate(self) -> float:
        """Tokens per second of its turns."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens that the engine has read of prompts."""
        return self.there(self.engine.stats).prefilled_tokens

    @property
    def stats(self) -> Stats:
        """What the engine counted, until it was left."""
        return self._after.since(self._before)

    def play(self, seconds: float = TURN_S) -> tuple[float, int]:
        """Go on for a turn, a step at least; return its seconds and tokens."""
        return self.there(lambda: self._play(seconds))

    def _play(self, seconds: float) -> tuple[float, int]:
        start_s, steps, before = perf_counter(), 0, self.engine.stats().output_tokens
        while not self.done and (not steps or perf_counter() - start_s < seconds):
            while self._waiting and len(self._open) < self._in_flight:
                request = self._waiting.popleft().request
                self.engine.add(request)
                self._open.add(request.request_id)
            steps += 1
            for outcome in self.engine.step():
                if outcome.finish_reason is not None:
                    self._open.discard(outcome.request_id)
        self.engine.loop.rest()  # a pass that was begun is this turn's, not beside another's
        turn_s = perf_counter() - start_s
        tokens = self.engine.stats().output_tokens - before  # those told with the next step among them
        self.seconds += turn_s
        self.tokens += tokens
        return turn_s, tokens

    def leave(self, name: str) -> None:
        """Let go of what is not answered. Raises `PacelineError` if a drafter failed: it may be given up."""
        self.there(self._leave)
        if self._after.drafter_failures:
            raise PacelineError(f"{name}: a drafter failed; the log says why, and nothing is recorded")

    def _leave(self) -> None:
        self._after = self.engine.stats()
        for request_id in self._open:
            self.engine.cancel(request_id)
        while self.engine.has_work:
            self.engine.step()
        self._waiting.clear()
        self._open.clear()

    def there(self, call: Callable[[], T]) -> T:
        """Make a call where the engine lives."""
        return call() if self._worker is None else self._worker.call(call)


def warm(engine: Engine, asked: Sequence[Question], in_flight: int, worker: PassThread | None = None) -> Player:
    """Return a player whose engine has met this size and is cold again. worker: see `Player`."""
    before = Player(engine, asked[:in_flight], in_flight, worker=worker)
    while not before.done:
        before.play()
    before.there(engine.forget)
    return Player(engine, asked, in_flight, worker=worker)


def race(players: Mapping[str, Player]) -> None:
    """Play until all are done, in turns. Raises `PacelineError` if a drafter failed."""
    while not all(player.done for player in players.values()):
        for player in players.values():
            if not player.done:
                player.play()
    for name, player in players.items():
        player.leave(name)


def rates(engines: Mapping[str, Engine], asked: Sequence[Question], in_flight: int) -> dict[str, float]:
    """Return the tokens per second of each policy on the same questions, so many in flight, in turns.

    Each begins cold and answers all of them. If it stopped where fewer are left, prompts would have been read that
    nobody has answered yet, and of plain decoding, whose rows end together, others than of drafts. Raises
    `PacelineError` if a drafter failed.
    """
    players = {name: warm(engine, asked, in_flight) for name, engine in engines.items()}
    race(players)
    return {name: player.rate for name, player in players.items()}
