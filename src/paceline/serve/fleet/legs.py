"""Open answers and their legs: how each begins to count, and how it ends."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as with_fields

from paceline.core.request_nouns import Outcome
from paceline.serve.fleet.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from prometheus_client import Counter

    from paceline.core.errors import PacelineError
    from paceline.serve.engines import Answers
    from paceline.serve.fleet.journal import AnswerLeg, OngoingAnswer
    from paceline.serve.fleet.member import Member

log = logging.getLogger(__name__)

MOST_STRIKES = 3  # replicas that ended with a request since its answer last gained anything
POISON = "this request ended every engine that took it, so it is given up"


class Legs:
    """The journal with the replicas' counts of legs.

    An answer that ends leaves no leg behind.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        spawn: Callable[[Coroutine[Any, Any, object]], None],
        hedged: Counter,
    ) -> None:
        """spawn: runs a coroutine as a task. hedged: a metric, see `FleetMetrics`."""
        self.journal = Journal()
        self.closed = False  # no answer is begun any more
        self._members, self._spawn, self._hedged = members, spawn, hedged

    def is_open(self, answer: OngoingAnswer) -> bool:
        """Return whether an answer is still written, or waits."""
        return self.journal.open.get(answer.request.request_id) is answer

    def end(self, answer: OngoingAnswer, leg: AnswerLeg) -> Answers | None:
        """Forget a leg; return what its replica may still have to cancel."""
        answer.end_leg(leg)
        self._members[leg.replica].end(leg.backlog, leg.length)
        leg.backlog = leg.length = 0
        return leg.answers

    def drop(self, answer: OngoingAnswer, leg: AnswerLeg) -> None:
        """Forget a leg, and cancel it at its replica."""
        if (at_replica := self.end(answer, leg)) is not None:
            self._spawn(at_replica.close())

    def settle(self, answer: OngoingAnswer, ahead: AnswerLeg, tokens_ahead: int) -> None:
        """Stop the other replica of an answer once one is ahead by so many tokens."""
        for other in tuple(answer.legs):
            if other is not ahead and ahead.num_tokens - other.num_tokens >= tokens_ahead:
                self._hedged.labels("first" if ahead is answer.legs[0] else "second").inc()
                self.drop(answer, other)

    def leave(self, answer: OngoingAnswer) -> None:
        """Give up all replicas of an answer, none of which is to blame."""
        answer.lost_s = time.monotonic()
        for leg in tuple(answer.legs):
            self.drop(answer, leg)

    def renew(self, member: Member, before: str) -> None:
        """Give a replica's answers the promise key of its newer weights.

        before: its key until then. Waiting answers get the new key, too, once no replica has the old one.
        """
        for answer, leg in self.journal.on(member.name):
            leg.promise = answer.promise = member.promise
        if all(other.promise != before for other in self._members.values()):
            for answer in self.journal.open.values():
                if not answer.legs and answer.promise == before:
                    answer.promise = member.promise

    def put(self, answer: OngoingAnswer, outcome: Outcome) -> None:
        """Tell the client an outcome."""
        answers, request_id = answer.answers, answer.request.request_id
        if outcome.request_id != request_id:
            outcome = with_fields(outcome, request_id=request_id)
        answers.put((answers.index[request_id], outcome))

    def fail(self, answer: OngoingAnswer, what: PacelineError | Outcome) -> None:
        """End an answer with an error, or as one that was aborted."""
        if not self.is_open(answer):
            return
        what = answer.aborted_end() if answer.aborted else what
        if isinstance(what, Outcome):
            self.put(answer, what)
        else:
            answer.answers.put(what)
        self.forget(answer)

    def fail_all(self, error: PacelineError) -> None:
        """End all answers with an error, for good, and cancel nothing."""
        self.closed = True
        for answer in tuple(self.journal.open.values()):
            for leg in tuple(answer.legs):
                self.end(answer, leg)
            self.fail(answer, error)

    def give_up(self, answer: OngoingAnswer) -> None:
        """End an answer that ends its replicas."""
        name = answer.request.request_id
        log.error("request %s: %s", name, POISON)
        self.fail(answer, Outcome(name, (), "", finish_reason="error", error=POISON, start=answer.num_tokens))

    def blame(self, process: tuple[str, int], heard_s: float) -> None:
        """Count a strike for answers that a process, now replaced, hung with.

        heard_s: when the process last spoke. An answer that had left it before that did not end it.
        """
        for answer in tuple(self.journal.open.values()):
            if answer.hung.pop(process, heard_s) > heard_s:
                answer.strikes += 1
                if answer.strikes >= MOST_STRIKES:
                    self.give_up(answer)

    def forget(self, answer: OngoingAnswer) -> None:
        """Close an answer that has ended, with all its legs."""
        request_id = answer.request.request_id
        self.journal.end(request_id)
        answer.answers.index.pop(request_id, None)
        for leg in tuple(answer.legs):
            self.drop(answer, leg)
