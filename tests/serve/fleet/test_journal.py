"""The journal as a state machine: deaths, late words, words told twice, lost words, two writers at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.figures import Spent
from paceline.core.request_nouns import Outcome, TokenLogprobs
from paceline.engine.wire import MAX_ID_CHARS
from paceline.serve.engines import Answers
from paceline.serve.fleet.journal import DEATH, HANG, MOST_UNSTARTED, Journal, WordsMissing, answer_id
from paceline.serve.fleet.legs import MOST_STRIKES
from tests.serve.fleet.fake_engines import Heard, Row, request_of

if TYPE_CHECKING:
    from paceline.serve.fleet.journal import AnswerLeg, OngoingAnswer

NO_ANSWERS: Any = Answers(None, {})  # type: ignore[arg-type]


class AnAnswer(RuleBasedStateMachine):
    """One answer, its replicas, and a client who must hear each token once, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.request = request_of("r", max_tokens=25)
        self.answer: OngoingAnswer = Journal().begin(self.request, NO_ANSWERS)
        self.heard = Heard()
        self.rows: dict[int, Row] = {}  # by identity of the leg, also of those that are given up
        self.said: list[tuple[AnswerLeg, Outcome]] = []
        self.given_up: list[AnswerLeg] = []

    @property
    def goes_on(self) -> bool:
        return self.heard.last is None

    def hear(self, leg: AnswerLeg, outcome: Outcome) -> None:
        if leg not in self.answer.legs:
            return  # as the fleet does
        self.said.append((leg, outcome))
        news = self.answer.news(leg, outcome)
        if news is not None:
            self.heard.take((0, news))

    @precondition(lambda self: self.goes_on and len(self.answer.legs) < 2)
    @rule()
    def begin_a_leg(self) -> None:
        leg = self.answer.begin_leg("replica")
        self.rows[id(leg)] = Row(self.request, list(self.answer.continued(leg).told))

    @precondition(lambda self: self.goes_on and self.answer.legs)
    @rule(which=st.integers(0, 1), count=st.integers(1, 5))
    def say(self, which: int, count: int) -> None:
        leg = self.answer.legs[which % len(self.answer.legs)]
        self.hear(leg, self.rows[id(leg)].more(count))

    @precondition(lambda self: self.goes_on and self.said)
    @rule(data=st.data())
    def say_again(self, data: st.DataObject) -> None:
        before = len(self.heard.token_ids)
        self.hear(*data.draw(st.sampled_from(self.said)))
        assert len(self.heard.token_ids) == before

    @precondition(lambda self: self.goes_on and self.answer.legs)
    @rule(lost=st.integers(1, 3), count=st.integers(1, 3))
    def lose_words(self, lost: int, count: int) -> None:
        leg = self.answer.legs[0]
        row = self.rows[id(leg)]
        if row.more(lost).finish_reason is None:
            with pytest.raises(WordsMissing):
                self.answer.news(leg, row.more(count))
        self.give_up(leg)

    @rule(which=st.integers(0, 1))
    def end_a_leg(self, which: int) -> None:
        if self.answer.legs:
            self.give_up(self.answer.legs[which % len(self.answer.legs)])

    def give_up(self, leg: AnswerLeg) -> None:
        self.answer.end_leg(leg)
        self.given_up.append(leg)

    @precondition(lambda self: self.goes_on and self.given_up)
    @rule(data=st.data())
    def speak_late(self, data: st.DataObject) -> None:
        leg = data.draw(st.sampled_from(self.given_up))
        if len(self.rows[id(leg)].told) < self.request.params.max_tokens:
            self.hear(leg, self.rows[id(leg)].more(2))

    @invariant()
    def the_client_has_what_the_journal_has(self) -> None:
        assert self.heard.token_ids == list(self.answer.told)
        assert len(self.heard.text) == self.answer.num_chars

    def teardown(self) -> None:
        """However it went, one more leg brings the rest."""
        if self.goes_on:
            leg = self.answer.begin_leg("last")
            row = Row(self.request, list(self.answer.continued(leg).told))
            self.rows[id(leg)] = row
            while self.goes_on:
                self.hear(leg, row.more(4))
        self.heard.check_whole(self.request)
        figures = self.heard.last.figures  # type: ignore[union-attr]
        assert figures is not None
        assert 1 <= figures.legs <= len(self.rows)


AnAnswer.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestAnAnswer = AnAnswer.TestCase


LEGS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(0, 3), st.sampled_from("ab")))


@given(LEGS)
def test_versions_of_an_answer_are_those_that_wrote_each_token(legs: list[tuple[int, str, int, str]]) -> None:
    """Each leg writes some tokens by one version, then some by another."""
    request, wrote = request_of("r", max_tokens=1000), list[str]()
    answer = Journal().begin(request, NO_ANSWERS)
    for number, (count, version, more, newer) in enumerate(legs):
        leg = answer.begin_leg(str(number))
        for tokens, wanted in ((count, version), (more, newer)):
            start = len(wrote)
            assert answer.news(leg, Outcome("r", (), "", start=start, version=wanted)) is None
            if tokens:
                answer.news(leg, Outcome("r", tuple(range(tokens)), "", start=start))
            wrote += [wanted] * tokens
        answer.end_leg(leg)
    found = answer.aborted_end().figures.weights  # type: ignore[union-attr]
    by_token = [next(name for start, name in reversed(found) if start <= index) for index in range(len(wrote))]
    assert by_token == wrote
    assert all(one[0] < other[0] and one[1] != other[1] for one, other in pairwise(found))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20))
def test_only_deaths_in_its_steps_are_strikes(deaths: list[tuple[bool, bool]]) -> None:
    """Each death is one of a replica that had begun a step of it or not, and had given words or not."""
    answer = Journal().begin(request_of("r", max_tokens=100), NO_ANSWERS)
    seen: list[str] = []
    for number, (started, gives) in enumerate(deaths):
        leg = answer.begin_leg(str(number))
        row = Row(request_of("r", max_tokens=100), list(answer.continued(leg).told))
        assert answer.continued(leg).tells_start
        if started or gives:
            assert answer.news(leg, Outcome("r", (), "", start=len(row.told))) is None
        if gives:
            assert answer.news(leg, row.more(1)) is not None
        answer.end_leg(leg)
        answer.strike(leg, DEATH, (str(number), 0))
        seen.append("gave" if gives else "started" if started else "early")
        fresh = seen[last_index(seen, "gave") :]
        early = len(seen) - 1 - max(last_index(seen, "gave", -1), last_index(seen, "started", -1))
        assert answer.strikes >= sum(kind != "early" for kind in fresh)
        if all(kind != "early" for kind in fresh) or len(seen) <= MOST_UNSTARTED:
            assert answer.strikes == sum(kind != "early" for kind in fresh)
        if early >= MOST_UNSTARTED + MOST_STRIKES:
            assert answer.strikes >= MOST_STRIKES, "what ends replicas at once is given up, too"


def test_only_a_first_leg_holds_what_it_writes() -> None:
    """Else a request that ends its replicas after some tokens would get on with each, by its first token."""
    for whole in (False, True):
        answer = Journal().begin(replace(request_of("r"), whole=whole), NO_ANSWERS)
        told = [answer.continued(answer.begin_leg(str(number))).whole for number in range(3)]
        assert told == [whole, False, False]


def test_hangs_before_any_step_of_it_are_blamed_only_behind_many() -> None:
    answer = Journal().begin(request_of("r", max_tokens=100), NO_ANSWERS)

    def hang(number: int) -> None:
        answer.end_leg(leg := answer.begin_leg(str(number)))
        answer.strike(leg, HANG, (str(number), 0))

    for number in range(MOST_UNSTARTED):
        hang(number)
    assert not answer.hung
    hang(MOST_UNSTARTED)
    assert answer.hung.keys() == {(str(MOST_UNSTARTED), 0)}
    leg = answer.begin_leg("works")
    answer.news(leg, Outcome("r", (), "", start=0))
    answer.end_leg(leg)  # as by a drain, which is no strike
    hang(MOST_UNSTARTED + 1)
    assert len(answer.hung) == 1
    assert not answer.strikes


def test_an_answer_that_gets_on_is_blamed_for_nothing_before() -> None:
    request = request_of("r", max_tokens=100)
    answer = Journal().begin(request, NO_ANSWERS)
    for number, why in enumerate((HANG, DEATH, DEATH)):
        leg = answer.begin_leg(str(number))
        answer.news(leg, Outcome("r", (), "", start=0))
        answer.end_leg(leg)
        answer.strike(leg, why, (str(number), 0))
    assert (answer.strikes, answer.hung.keys()) == (2, {("0", 0)})
    assert answer.news(answer.begin_leg("works"), Row(request, []).more(1)) is not None
    assert (answer.strikes, answer.hung) == (0, {})


def last_index(seen: list[str], kind: str, otherwise: int = 0) -> int:
    return max((index for index, one in enumerate(seen) if one == kind), default=otherwise)


def test_what_one_replica_says_is_passed_on_as_it_is() -> None:
    request = request_of("r", max_tokens=4)
    answer = Journal().begin(request, NO_ANSWERS)
    leg, row = answer.begin_leg("0"), Row(request, [])
    first = row.more(3)
    assert answer.news(leg, first) is first
    last = answer.news(leg, row.more(1))
    assert last is not None and last.figures is not None
    assert last.figures.legs == 1


def test_the_counts_of_a_dead_replica_are_not_lost() -> None:
    request = request_of("r", max_tokens=9)
    answer = Journal().begin(request, NO_ANSWERS)
    leg, row = answer.begin_leg("0"), Row(request, [])
    answer.news(leg, row.more(2))
    answer.news(leg, row.more(2))
    answer.end_leg(leg)
    leg = answer.begin_leg("1")
    row = Row(request, list(answer.continued(leg).told))
    news = answer.news(leg, row.more(5))
    assert news is not None and news.figures is not None
    assert (news.figures.decode_passes, news.figures.legs) == (3, 2)


def test_the_first_replica_says_what_was_cached() -> None:
    request = request_of("r", max_tokens=3)
    answer = Journal().begin(request, NO_ANSWERS)
    for replica, cached in (("0", 48), ("1", 16)):
        leg = answer.begin_leg(replica)
        outcome = Outcome("r", (1,), "a", start=len(answer.told), spent=Spent(cached_tokens=cached))
        answer.news(leg, outcome)
        answer.end_leg(leg)
    assert answer.spent is not None and answer.spent.cached_tokens == 48


def test_log_probabilities_follow_their_tokens() -> None:
    request = request_of("r", max_tokens=6)
    answer = Journal().begin(request, NO_ANSWERS)
    ahead, behind = answer.begin_leg("0"), answer.begin_leg("1")
    scores = tuple(TokenLogprobs(token, -float(token)) for token in range(6))
    answer.news(ahead, Outcome("r", (0, 1, 2), "abc", logprobs=scores[:3]))
    news = answer.news(behind, Outcome("r", (0, 1, 2, 3, 4), "abcde", logprobs=scores[:5], prompt_logprobs=None))
    assert news is not None
    assert (news.token_ids, news.text, news.start, news.logprobs) == ((3, 4), "de", 3, scores[3:5])


def test_the_scores_of_a_prompt_are_sent_once() -> None:
    answer = Journal().begin(request_of("r"), NO_ANSWERS)
    scores = (TokenLogprobs(1, -1.0),)
    first, second = answer.begin_leg("0"), answer.begin_leg("1")
    news = answer.news(first, Outcome("r", (), "", prompt_logprobs=scores))
    assert news is not None and news.prompt_logprobs == scores
    assert answer.news(second, Outcome("r", (), "", prompt_logprobs=scores)) is None


def test_a_told_token_takes_at_most_eight_bytes() -> None:
    answer = Journal().begin(request_of("r"), NO_ANSWERS)
    leg = answer.begin_leg("0")
    empty = answer.told.__sizeof__()
    for start in range(0, 4000, 2):
        answer.news(leg, Outcome("r", (start, start + 1), "", start=start))
    assert (answer.told.__sizeof__() - empty) / 4000 <= 8


def test_no_two_legs_share_an_id_that_an_engine_takes() -> None:
    for name in ("r", "a~b-0-0", "x" * (MAX_ID_CHARS - 12)):
        answer = Journal().begin(request_of(name), NO_ANSWERS)
        ids = [answer.continued(answer.begin_leg("0")).request_id for _ in range(200)]
        assert len(set(ids)) == 200
        assert max(map(len, ids)) <= MAX_ID_CHARS
        assert ids[0] == name
        assert {answer_id(leg_id) for leg_id in ids} == {name}
