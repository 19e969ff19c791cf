"""The journal: what clients of open requests were told, and which replicas write on.

A token counts once it has been sent to the client. What a replica computed and did not tell is computed again, by
whichever replica goes on, and comes out the same. So a replica that seems dead may be given up at once: if it
speaks again, its tokens equal those that were sent, and are skipped by their `start`.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as with_fields

from paceline.core.errors import PacelineError
from paceline.core.figures import Figures, Spent
from paceline.core.request_nouns import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.request_nouns import Request
    from paceline.serve.engines import Answers

DEATH = "death"
BROKEN = "broken"
FAULTS = frozenset({DEATH, BROKEN})  # reasons to blame a request
MOST_UNREAD = 3  # readings that told no token, after which an answer stays where it is written
MOST_UNSTARTED = 6  # replicas in a row that end before any step of an answer, and are not blamed on it
HANG = "hang"  # a fault only if the process was then replaced
LINE = "line"  # the line to its replica broke
MOVES = frozenset({"drain", "move"})
LEAVES = MOVES | {HANG, LINE}  # reasons to leave a replica that may live
LEG_MARK = "~"  # before the number of a leg in its id
MOST_LISTED = 200  # open requests in a table


def answer_id(leg_id: str) -> str:
    """Return the id of an answer's request, by that of a leg."""
    name, mark, number = leg_id.rpartition(LEG_MARK)
    return name if mark and number.isdigit() else leg_id


class WordsMissing(PacelineError):  # noqa: N818
    """A replica's outcome does not follow its last one: something was lost between."""


@dataclass(slots=True, eq=False)
class AnswerLeg:
    """The part of an answer that one replica writes."""

    request_id: str  # at the replica: no two legs of an answer share one
    replica: str
    promise: str  # promise key of the replica
    num_tokens: int  # of the answer, up to its last outcome
    num_chars: int
    began_s: float = 0.0  # time.monotonic()
    wait_s: float = 0.0  # until its first outcome, as predicted
    backlog: int = 0  # prompt tokens that it brought to the replica and that are not known to be computed
    length: int = 0  # tokens of prompt and answer when the leg began; 0 once it spoke
    answers: Answers | None = None  # at the replica; None until it has taken the request
    spent: Spent = field(default_factory=Spent)
    started: bool = False  # it took part in a step of its replica
    spoke: bool = False  # it has told an outcome
    gave: bool = False  # it has told an outcome that was new to the client
    being_read: bool = False  # another replica reads the answer, to go on with it
    num_unread: int = 0  # readings that told no token

    @property
    def is_kept(self) -> bool:
        """True while a replica that leaves should go on with this leg."""
        return self.being_read or self.num_unread >= MOST_UNREAD


@dataclass(slots=True, eq=False)
class OngoingAnswer:
    """One open request."""

    request: Request
    answers: Answers  # to its client
    told: array[int] = field(default_factory=lambda: array("i"))  # token ids sent to the client
    num_chars: int = 0  # of the text sent to the client
    scored: bool = False  # the log-probabilities of its prompt have been sent
    spent: Spent | None = None  # in legs that ended; None: no ended leg gave anything
    legs: list[AnswerLeg] = field(default_factory=list)  # that write now: one, or two of a hedged request
    num_legs: int = 0  # legs that gave something
    num_begun: int = 0  # legs begun so far
    promise: str = ""  # promise key that its replicas must have; empty: any, as nothing has been told
    inexact: bool = False  # it went on under another promise key
    banned: set[tuple[str, int]] = field(default_factory=set)  # (replica, restarts) of processes not to get it
    strikes: int = 0  # replicas that ended in a step of it since it last gained anything
    num_unstarted: int = 0  # replicas in a row that ended before any step of it, as in a killed fleet
    hung: dict[tuple[str, int], float] = field(default_factory=dict)  # process -> when given up; may speak again
    broken: bool = False  # a replica found no finite logit
    aborted: bool = False  # its replicas were told to end it
    refused: PacelineError | None = None  # the error of a replica that is full
    full: set[str] = field(default_factory=set)  # replicas that are full
    waits: bool = False  # for a replica
    deadline_s: float | None = None  # time.monotonic() when it is given up unless a replica has told an outcome
    retry_s: float = 0.0  # time.monotonic() before which no replica is asked
    why: str | None = None  # reason why its last replica was given up
    lost_s: float | None = None  # when its last replica was given up, until another one speaks
    weights: tuple[tuple[int, str], ...] = ()  # versions that wrote it, as in `Figures`
    page_hashes: tuple[bytes, ...] | None = None  # of the prompt, or of answer tokens, too; None: not needed yet

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far, those told with the request included."""
        return len(self.request.told) + len(self.told)

    @property
    def length(self) -> int:
        """Tokens of its prompt and of the answer so far."""
        return len(self.request.prompt_ids) + self.num_tokens

    def begin_leg(self, replica: str, promise: str = "") -> AnswerLeg:
        """Add the leg of a replica that goes on behind the client's tokens."""
        leg = self.new_leg(replica, promise)
        self.legs.append(leg)
        return leg

    def new_leg(self, replica: str, promise: str) -> AnswerLeg:
        """Return a leg that is not among `legs`."""
        name = self.request.request_id
        if self.num_begun:
            name += f"{LEG_MARK}{self.num_begun}"
        self.num_begun += 1
        return AnswerLeg(name, replica, promise, len(self.told), self.num_chars, length=self.length)

    def end_leg(self, leg: AnswerLeg) -> None:
        """Forget a leg; what it says from now on does not count."""
        self.legs.remove(leg)
        if leg.gave and not self.legs:  # else the leg that is left computes the same tokens
            earlier = self.spent
            self.spent = leg.spent if earlier is None else _summed(earlier, leg.spent)

    def strike(self, leg: AnswerLeg, why: str, process: tuple[str, int]) -> None:
        """Count a strike if the leg's replica has ended in a step of this answer.

        A slow replica is no strike. A replica that ended before any step is one only after many such: its step may
        not have been told in time. process: replica and its restarts.
        """
        if why not in FAULTS | {HANG}:
            return
        started = leg.started or why == BROKEN
        self.num_unstarted = 0 if started else self.num_unstarted + 1
        counts = started or self.num_unstarted > MOST_UNSTARTED
        if counts and why == HANG:
            self.hung[process] = time.monotonic()
        elif counts:
            self.strikes += 1

    def ends(self, why: str, resume: str) -> bool:
        """Return whether the answer ends with its replica. resume: value of --resume.

        It goes on if nothing was told and its replica, which may live, is only left.
        """
        if self.aborted:
            return why in MOVES  # its replica was told to end it, so it is not moved
        return resume == "off" and (bool(self.told) or why not in LEAVES)

    def forget_refusals(self) -> None:
        """Forget which replicas were full: they may have room now."""
        self.refused = None
        self.full.clear()

    def continued(self, leg: AnswerLeg) -> Request:
        """Return the request of a leg, which goes on behind the client's tokens.

        After the first leg each token is told at once, or an answer that ends its replicas would seem to get on.
        """
        told, whole = self.request.told + tuple(self.told), self.request.whole and self.num_begun == 1
        return replace(self.request, request_id=leg.request_id, told=told, tells_start=True, whole=whole)

    def news(self, leg: AnswerLeg, outcome: Outcome) -> Outcome | None:
        """Return what an outcome adds, and count it as sent; None if nothing.

        Raises `WordsMissing`.
        """
        leg.started, self.num_unstarted = True, 0
        if outcome.version is not None:
            self.weights = _joined(self.weights, ((outcome.start, outcome.version),))
        if not (outcome.token_ids or outcome.text or outcome.finish_reason or outcome.prompt_logprobs):
            return None  # a step of the answer begins
        start = outcome.start - len(self.request.told)
        if start > leg.num_tokens:
            raise WordsMissing(f"replica {leg.replica} told token {start} after {leg.num_tokens}")
        if start < leg.num_tokens:
            return None  # told twice
        skipped, before = len(self.told) - start, leg.num_chars
        leg.num_tokens += len(outcome.token_ids)
        leg.num_chars += len(outcome.text)
        leg.spent = leg.spent.after(outcome.spent, max(len(outcome.token_ids) - (not leg.spoke), 0))
        leg.spoke = True
        if outcome.prompt_logprobs is not None and self.scored:
            outcome = with_fields(outcome, prompt_logprobs=None)
        ids, text = outcome.token_ids[skipped:], outcome.text[max(self.num_chars - before, 0) :]
        if not (ids or text or outcome.finish_reason or outcome.prompt_logprobs):
            return None
        self.num_legs += not leg.gave
        leg.gave = True
        self.strikes = 0
        self.hung.clear()
        self.promise = self.promise or leg.promise
        self.inexact = self.inexact or leg.promise != self.promise
        self.scored = self.scored or outcome.prompt_logprobs is not None
        self.told.extend(ids)
        self.num_chars += len(text)
        if skipped:
            kept = None if outcome.logprobs is None else outcome.logprobs[skipped:]
            outcome = with_fields(outcome, token_ids=ids, text=text, logprobs=kept, start=outcome.start + skipped)
        return outcome if outcome.figures is None else with_fields(outcome, figures=self._total(outcome.figures))

    def figures(self) -> dict[str, Any]:
        """Return its line in the table of open requests."""
        replicas = ",".join(leg.replica for leg in self.legs)
        told = {"tokens": len(self.told), "legs": self.num_legs}
        return {"request": self.request.request_id, "replica": replicas} | told

    def aborted_end(self) -> Outcome:
        """Return the end of an aborted answer that has lost its replica."""
        counts = Figures(len(self.request.prompt_ids), self.num_tokens, 0, 0, 0, 0, 0, 0, self.request.seed)
        name, total = self.request.request_id, self._total(counts)
        return Outcome(name, (), "", finish_reason="abort", start=self.num_tokens, figures=total)

    def _total(self, figures: Figures) -> Figures:
        """Return the counts of all replicas that wrote the answer."""
        whole = figures if self.spent is None else figures.behind(self.spent)
        weights = _joined(self.weights, figures.weights)
        return replace(whole, legs=max(self.num_legs, 1), inexact=self.inexact, weights=weights)


def _joined(
    weights: tuple[tuple[int, str], ...], then: tuple[tuple[int, str], ...]
) -> tuple[tuple[int, str], ...]:
    """Return which weights wrote an answer, as one replica and then another say."""
    found = list[tuple[int, str]]()
    for start, version in (*(one for one in weights if not then or one[0] < then[0][0]), *then):
        if not found or found[-1][1] != version:
            found.append((start, version))
    return tuple(found)


def _summed(first: Spent, then: Spent) -> Spent:
    """Return the counts of two legs; the first one says what was cached."""
    return Spent._make((first.cached_tokens, *(a + b for a, b in zip(first[1:], then[1:], strict=True))))


class Journal:
    """The open requests."""

    def __init__(self) -> None:
        self.open: dict[str, OngoingAnswer] = {}
        self.had_grammar = False  # a request had a grammar

    def begin(self, request: Request, answers: Answers, promise: str = "") -> OngoingAnswer:
        """Open a request. promise: key of the replicas that may have it; empty: any."""
        self.had_grammar = self.had_grammar or request.params.grammar is not None
        self.open[request.request_id] = answer = OngoingAnswer(request, answers, promise=promise)
        return answer

    def end(self, request_id: str) -> OngoingAnswer | None:
        """Forget a request; None if it is not open."""
        return self.open.pop(request_id, None)

    def figures(self) -> list[dict[str, Any]]:
        """Return the table of open requests, of `MOST_LISTED` at most."""
        return [answer.figures() for answer in islice(self.open.values(), MOST_LISTED)]

    def on(self, replica: str) -> Iterator[tuple[OngoingAnswer, AnswerLeg]]:
        """Yield the answers that a replica writes, and its legs. They may be ended meanwhile."""
        for answer in tuple(self.open.values()):
            for leg in tuple(answer.legs):
                if leg.replica == replica:
                    yield answer, leg
