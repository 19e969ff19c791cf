"""Turns of a second: what is counted, what is let go of, and that nothing of a turn is left for another's."""

from __future__ import annotations

from threading import current_thread
from typing import TYPE_CHECKING

import pytest

from paceline.backend.pending import PassThread
from paceline.bench.compare.players import Player, race, rates, warm
from paceline.bench.prompts import Prompt
from paceline.bench.run import Question
from paceline.core.errors import PacelineError
from paceline.core.nouns import Request
from paceline.core.params import SamplingParams
from paceline.engine.overlap import OverlappedLoop
from tests.engine.same_text import PLAIN, make_engine

if TYPE_CHECKING:
    from paceline.core.nouns import Outcome
    from paceline.engine.engine import Engine


def questions(*lengths: int) -> list[Question]:
    """Questions whose answers are so long."""
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    return [Question(Prompt(i, "any", ""), Request(str(i), (40, 41 + i), p, seed=i)) for i, p in enumerate(params)]


def test_a_player_goes_on_where_it_stopped_until_all_is_answered() -> None:
    player = Player(make_engine("off", PLAIN), questions(3, 5, 2), 2)
    turns = []
    while not player.done:
        turns.append(player.play(1e-9))
    assert len(turns) > 3
    assert player.tokens == sum(tokens for _, tokens in turns) == 10
    assert player.seconds == sum(seconds for seconds, _ in turns) > 0
    assert player.rate == player.tokens / player.seconds


def test_left_before_the_end_it_lets_go_of_what_is_not_answered() -> None:
    engine = make_engine("off", PLAIN)
    player = Player(engine, questions(3, 3, 50, 4), 2)
    while player.full:
        player.play(1e-9)
    player.leave("a")
    assert 10 <= player.tokens < 60
    assert player.stats.output_tokens == player.tokens, "what letting go takes is not counted"
    assert not engine.has_work
    assert player.done
    engine.check()


def test_each_plays_the_same_questions_from_a_cold_start() -> None:
    engines = {name: make_engine("ngram:k=2", PLAIN) for name in ("a", "b")}
    found = rates(engines, questions(6, 6, 6, 9), 2)
    assert found.keys() == {"a", "b"}
    assert all(rate > 0 for rate in found.values())
    assert {e.stats().output_tokens for e in engines.values()} == {12 + 27}, "all, and two to warm up"
    player = warm(engines["a"], questions(6, 6, 6), 2)
    race({"a": player})
    assert player.stats.cached_tokens == 0


def test_an_engine_that_takes_turns_of_its_own_rests_between_those_of_others() -> None:
    engine = make_engine("ngram:k=2", PLAIN)
    engine.loop = loop = OverlappedLoop(PassThread("target"), lambda _: True)
    player = Player(engine, questions(*[12] * 6), 4)
    passes = 0
    while not player.done:
        player.play(1e-9)
        if loop._pending is not None:
            assert loop._pending.pass_s > 0.0, "it was waited for"
            passes += 1
    assert passes > 3, "passes were begun in one turn and taken in in the next"
    assert player.tokens == 72


def test_an_engine_is_played_where_it_lives() -> None:
    engine, where = make_engine("off", PLAIN), set[str]()
    step = engine.step

    def watched() -> list[Outcome]:
        where.add(current_thread().name)
        return step()

    engine.step = watched  # type: ignore[method-assign]
    race({"a": warm(engine, questions(3, 3, 3), 2, worker=PassThread("elsewhere"))})
    assert where == {"elsewhere"}


def test_a_drafter_that_failed_spoils_the_race() -> None:
    engine = make_engine("ngram:k=2", PLAIN)
    fail(engine)
    with pytest.raises(PacelineError, match="one of them: a drafter failed"):
        race({"one of them": Player(engine, questions(9), 1)})


def fail(engine: Engine) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("not now")

    for drafter in engine.drafting.drafters.values():
        drafter.propose = broken  # type: ignore[assignment,method-assign]
