"""Dispatch: the choice of a request's replica, from the views of all replicas."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from paceline.control.routing import RequestView, Router, policy_named
from paceline.core.nouns import PAGE_TOKENS
from paceline.serve.fleet.index import PrefixIndex, page_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from paceline.control.routing import RouteChoice
    from paceline.serve.fleet.fleet_metrics import FleetMetrics
    from paceline.serve.fleet.fleet_options import ReplicaOptions
    from paceline.serve.fleet.journal import AnswerLeg, OngoingAnswer
    from paceline.serve.fleet.member import Member
    from paceline.serve.worker.messages import Ready

ANY = "any"  # value of --resume
# Kinds of replicas, in the order they are asked. Replicas that seem to hang come last: better than none.
WILLING: tuple[Callable[[Member], bool], ...] = (lambda m: m.alive, lambda m: m.able, lambda m: m.serves)


class Dispatch:
    """The router with what it needs to know."""

    def __init__(self, options: ReplicaOptions, members: Mapping[str, Member], metrics: FleetMetrics) -> None:
        self._members, self._metrics = members, metrics
        self._any_promise = options.resume == ANY
        self._router = Router(policy_named(options.route))
        self._index = PrefixIndex()

    def choose(self, answer: OngoingAnswer, without: Collection[str] = ()) -> tuple[Member, RouteChoice] | None:
        """Return the replica for an answer, now; None if there is none."""
        start_s = perf_counter()
        promises = dict.fromkeys((answer.promise, "") if self._any_promise else (answer.promise,))
        tries = (self._chosen(answer, without, one, promise) for promise in promises for one in WILLING)
        found = next((one for one in tries if one is not None), None)
        self._metrics.route_s.observe(perf_counter() - start_s)
        return found

    def can_place(self, answer: OngoingAnswer, without: Collection[str] = (), *, silent: bool = False) -> bool:
        """Return whether `choose` finds a replica, with `silent` also one that seems to hang.

        The router counts no request.
        """
        barred = self._banned(answer).union(without)
        left = [member for name, member in self._members.items() if name not in barred]
        return any((m.serves if silent else m.able) and self.fits(answer, m) for m in left)

    def fits(self, answer: OngoingAnswer, member: Member) -> bool:
        """Return whether a replica's promise key allows it to go on with an answer."""
        return self._any_promise or answer.promise in ("", member.promise)

    def second(self, answer: OngoingAnswer, first: AnswerLeg) -> tuple[Member, RouteChoice] | None:
        """Return a second replica, with the first one's promise key; None if there is none."""
        answer.promise = first.promise  # from now on, as either may speak first
        return self._chosen(answer, {first.replica, *answer.full}, WILLING[0], first.promise)

    def any_left(self, answer: OngoingAnswer) -> bool:
        """Return whether a replica may have an answer, now or when back in service."""
        banned = self._banned(answer)
        return any(not member.serves or name not in banned for name, member in self._members.items())

    def _banned(self, answer: OngoingAnswer) -> set[str]:
        members = self._members
        return {one[0] for one in answer.banned if (found := members.get(one[0])) and found.process == one}

    def key_for_new(self, ready: Ready) -> str:
        """Return the promise key that a new answer's replicas must have; empty: any.

        ready: what clients are told of the fleet. The prompt was made with its tokenizer.
        """
        return "" if self._any_promise else ready.promise

    def _chosen(
        self, answer: OngoingAnswer, without: Collection[str], fits: Callable[[Member], bool], promise: str
    ) -> tuple[Member, RouteChoice] | None:
        members, banned = self._members, self._banned(answer)
        hits = self._index.hits(self._hashes(answer)) if len(members) > 1 else {}
        view = RequestView(answer.length, answer.page_hashes or (), frozenset(banned.union(without)), promise)
        views = [member.view(hits.get(name, 0), alive=fits(member)) for name, member in members.items()]
        choice = self._router.choose(view, views)
        return None if choice is None else (members[choice.replica], choice)

    def fresh_tokens(self, answer: OngoingAnswer, member: Member) -> int:
        """Return the tokens that a replica would have to prefill."""
        hits = self._index.hits(self._hashes(answer)).get(member.name, 0)
        return max(answer.length - hits * PAGE_TOKENS, 1)

    def began(self, answer: OngoingAnswer, member: Member) -> None:
        """Note that a replica gets a prompt's pages."""
        self._note(member, self._hashes(answer))

    def ended(self, answer: OngoingAnswer, member: Member) -> None:
        """Note that a replica has an answer's pages, which the next turn begins with."""
        if len(answer.told) >= PAGE_TOKENS:
            self._note(member, page_hashes(answer.request, answer.told))

    def read(self, answer: OngoingAnswer, member: Member, hashes: tuple[bytes, ...]) -> None:
        """Note that a replica has an answer's pages, with which it can go on."""
        answer.page_hashes = hashes
        self._note(member, hashes)

    def _note(self, member: Member, hashes: tuple[bytes, ...]) -> None:
        if member.ready is not None and member.ready.keeps_pages:
            self._index.add(member.name, hashes, member.num_pages)

    def forget(self, name: str) -> None:
        """Note that a replica's process has ended."""
        self._index.forget(name)

    def _hashes(self, answer: OngoingAnswer) -> tuple[bytes, ...]:
        if answer.page_hashes is None:
            answer.page_hashes = page_hashes(answer.request)
        return answer.page_hashes
