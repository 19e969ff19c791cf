"""A fleet: several engines as one, and answers that outlive them.

Every answer is in the journal. When its replica dies, hangs, is told to stop, or finds no finite logit, another
one with the same promise key gets the request with the tokens that its client has, and goes on bit for bit.
A wrong suspicion costs work, never a wrong token, so the fleet may suspect soon.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.core.errors import EngineDied, LineBroke, PacelineError, QueueFull, RequestError
from paceline.core.request_nouns import Outcome
from paceline.core.weight_source import ASLEEP
from paceline.serve.engines import NOT_READY, RESTARTING, STOPPING, Answers, Disconnected
from paceline.serve.fleet.audit import Audit, Audits
from paceline.serve.fleet.dispatch import ANY, Dispatch
from paceline.serve.fleet.fleet_commands import FleetCommands
from paceline.serve.fleet.fleet_metrics import FleetMetrics
from paceline.serve.fleet.handover import hand_over, warm_up
from paceline.serve.fleet.hedging import BUDGET, Hedging
from paceline.serve.fleet.journal import DEATH, HANG, LEAVES, LINE, MOVES, WordsMissing
from paceline.serve.fleet.legs import MOST_STRIKES, Legs
from paceline.serve.fleet.member import TICK_S, Member, common_ready, summed, tell_costs, tell_of_mixed
from paceline.serve.fleet.tail import Tail
from paceline.serve.fleet.ticks import tick_every

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from paceline.core.request_nouns import Request
    from paceline.engine.stats import Stats
    from paceline.serve.engines import Event, OnEvent, ReplicaEngine
    from paceline.serve.fleet.fleet_options import ReplicaOptions
    from paceline.serve.fleet.journal import AnswerLeg, OngoingAnswer
    from paceline.serve.worker.messages import Language, Ready, Snapshot

log = logging.getLogger(__name__)

TOGETHER_S = 0.03  # replicas that die within this time die together: none of them is sent an answer of another
AHEAD_TOKENS = 8  # lead of one of two replicas that write a streamed answer, at which the other stops
FULL_WAIT_S = 1.0  # wait before full replicas are asked again to go on with an answer


class EngineFleet:
    """Several engines that write the same texts; see `Engines`."""

    pid: int | None = None  # None: a fleet is several processes

    def __init__(self, options: ReplicaOptions) -> None:
        """Begin without replicas; see `add`. Call in a running event loop."""
        self.options, self.members = options, dict[str, Member]()
        self.metrics = FleetMetrics(self.members)
        self.first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.on_snapshot: Callable[[Snapshot], None] | None = None
        self.on_language: Callable[[Language], None] | None = None
        self._dispatch = Dispatch(options, self.members, self.metrics)
        self._legs = Legs(self.members, self.spawn, self.metrics.hedged)
        self.commands = FleetCommands(self.members, self._legs.journal.open, self.spawn)
        self._hedging = Hedging(BUDGET if options.hedge != "off" else 0.0)
        self._audits = Audits(options.audit, self.metrics.audited, self.metrics.audit_mismatches)
        self._tail = Tail(options.tail, self.members, self._legs.journal, self.move)
        self._gone: Stats | None = None  # counters of replicas that were removed
        self._watches = False
        self._tasks: set[asyncio.Task[object]] = set()  # of this fleet, to be ended with it
        self.spawn(tick_every(TICK_S, self._tick))

    def add(self, name: str, engines: ReplicaEngine, cores: frozenset[int] = frozenset()) -> Member:
        """Take a replica in, which may still load."""
        member = self.members[name] = Member(name, engines, cores, incarnation=engines.restarts)
        engines.on_snapshot = member.take
        engines.on_ready = partial(self._is_ready, member)
        engines.on_draining = member.note_draining
        engines.on_renewed = partial(self._renewed, member)
        engines.on_language = self._language
        engines.first_ready.add_done_callback(partial(self._loaded, member))
        if engines.ready is not None:
            self._is_ready(member)
        if self._watches:
            self.spawn(engines.watch(on=True))
        self.commands.level(member)
        return member

    def remove(self, name: str) -> None:
        """Forget a replica that is gone for good, and what is known of it."""
        member = self.members.pop(name)
        self._gone = member.counted(self._gone)
        self._dispatch.forget(name)
        self.metrics.forget(name)
        member.engines.kill()  # which ends its tasks

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine as a task, for as long as the fleet runs."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # As one engine -----------------------------------------------------------------------------------

    @property
    def ready(self) -> Ready | None:
        """Message of the replicas that may get new requests; None without any."""
        return common_ready(self.members.values())

    @property
    def num_open(self) -> int:
        """Number of answers that run or wait."""
        return len(self._legs.journal.open)

    @property
    def restarts(self) -> int:
        """Restarts of all replicas."""
        return sum(member.engines.restarts for member in self.members.values())

    @property
    def snapshot(self) -> Snapshot | None:
        """Sum of the replicas' newest counters."""
        return summed(self.members.values(), self._gone)

    async def submit(self, requests: Sequence[Request], on_event: OnEvent | None = None) -> Answers:
        """Send each request to a replica. Raises `EngineDied` while there is none."""
        if self._legs.closed:  # nobody would serve a request that waits
            raise EngineDied(STOPPING)
        if (ready := self.ready) is None:
            raise EngineDied(NOT_READY)
        if released := self.commands.state.released:
            raise EngineDied(ASLEEP.format(" and ".join(sorted(released))))
        self._tail.came()
        answers = Answers(self, {r.request_id: i for i, r in enumerate(requests)}, on_event)
        promise = self._dispatch.key_for_new(ready)
        begun = [self._legs.journal.begin(request, answers, promise) for request in requests]
        self._hedging.came(len(begun))
        try:
            for answer in begun:
                await self._place(answer)
        except BaseException:
            await self.cancel(answers)
            raise
        return answers

    async def cancel(self, answers: Answers) -> None:
        """End the open ones of these answers; no further event is put."""
        still_open = list(answers.index)
        answers.index.clear()
        legs = []
        for request_id in still_open:
            if (answer := self._legs.journal.end(request_id)) is not None:
                legs += [self._legs.end(answer, leg) for leg in tuple(answer.legs)]
        for at_replica in legs:
            if at_replica is not None:
                await at_replica.close()

    async def watch(self, *, on: bool) -> None:
        """Choose if snapshots carry the engines' last steps."""
        self._watches = on
        for member in tuple(self.members.values()):
            await member.engines.watch(on=on)

    def finish(self) -> None:
        """Note that the server ends once the open requests are answered."""
        for member in self.members.values():
            member.server_ends = True
            member.engines.finish()

    async def stop(self) -> None:
        """End all replicas and everything that is open. May be called twice."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._legs.fail_all(EngineDied(STOPPING))
        await asyncio.gather(*(member.engines.stop() for member in self.members.values()))
        self.first_ready.cancel()

    def kill(self) -> None:
        """End all replicas and all that is open at once; `stop` must still be called."""
        self._legs.fail_all(EngineDied(STOPPING))
        for member in self.members.values():
            member.engines.kill()

    def abandon(self) -> None:
        """End all replicas at once, from outside a task; nothing else may be called then."""
        for task in self._tasks:
            task.cancel()
        for member in self.members.values():
            member.engines.abandon()

    # For operators -----------------------------------------------------------------------------------

    def drain(self, name: str, *, undo: bool = False) -> int:
        """Take a replica out of service; return how many answers will move. Raises `RequestError`."""
        member = self._member(name)
        member.draining, member.by_signal, member.moves_s = not undo, False, 0.0
        for _, leg in self._legs.journal.on(name):
            leg.num_unread = 0
        return 0 if undo else self._move_all(member, "drain")

    async def move(self, request_id: str, name: str) -> None:
        """Give an answer to another replica. Raises `RequestError`."""
        member, answer = self._member(name), self._legs.journal.open.get(request_id)
        if answer is None:
            raise RequestError(f"no request {request_id[:128]!r} is open; `paceline fleet` lists them", "request")
        if not member.alive or answer.promise not in ("", member.promise) or answer.aborted:
            raise RequestError(f"replica {name} cannot go on with this answer now", "replica")
        if not answer.legs or any(leg.replica == name for leg in answer.legs):
            raise RequestError(f"replica {name} writes this answer already, or it waits for one", "request")
        await self._give(answer, "move", member)

    async def _give(self, answer: OngoingAnswer, why: str, member: Member) -> None:
        self._legs.leave(answer)
        answer.why = why
        if not await self._begin_leg(answer, member, why):
            await self._place(answer, why)

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return the tables of replicas and of open requests."""
        return {"replicas": [m.figures() for m in self.members.values()], "requests": self._legs.journal.figures()}

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise RequestError(f"no replica {name[:64]!r}; there are {', '.join(self.members)}", "replica")
        return self.members[name]

    # Placing answers ---------------------------------------------------------------------------------

    async def _place(self, answer: OngoingAnswer, why: str | None = None) -> None:
        """Give an answer to a replica, or let it wait for one.

        why: reason why it goes on elsewhere; None: it is new.
        """
        if why == DEATH:
            await asyncio.sleep(TOGETHER_S)
        tried = set(answer.full)
        while self._legs.is_open(answer) and not answer.legs:
            found = None if answer.aborted else self._dispatch.choose(answer, tried)
            if found is None:
                self._wait(answer, why)
                return
            member, choice = found
            self.metrics.routed.labels(member.name, choice.why).inc()
            if await self._begin_leg(answer, member, why):
                return
            tried.add(member.name)

    async def _begin_leg(self, answer: OngoingAnswer, member: Member, why: str | None) -> bool:
        """Send a request to a replica; False if it takes none."""
        ready = member.ready
        if ready is None:
            return False
        fresh = self._dispatch.fresh_tokens(answer, member)
        leg = answer.begin_leg(member.name, ready.promise)
        leg.began_s, leg.wait_s, leg.backlog = time.monotonic(), member.wait_s(fresh), fresh
        member.begin(fresh, leg.length)
        try:
            at_replica = await member.engines.submit([answer.continued(leg)], partial(self._on_event, answer, leg))
        except EngineDied:
            if leg in answer.legs:
                self._legs.end(answer, leg)
                return False
            return True
        if leg not in answer.legs:  # the leg has ended meanwhile
            await at_replica.close()
            return True
        leg.answers = at_replica
        self._dispatch.began(answer, member)
        if why is not None:
            member.num_resumed += 1
            self.metrics.resumed.labels(why).inc()
            self.metrics.moved.inc(why in MOVES)
        return True

    def _wait(self, answer: OngoingAnswer, why: str | None) -> None:
        """Keep an answer until there is a replica for it, or end it."""
        if answer.refused is not None and not answer.told:
            self._legs.fail(answer, answer.refused)
            return
        if answer.strikes >= MOST_STRIKES - 1 and self.ready is not None:  # all replicas left are banned
            self._legs.give_up(answer)
            return
        answer.why = why
        answer.full.clear()
        answer.waits = True
        answer.retry_s = 0.0 if answer.refused is None else time.monotonic() + FULL_WAIT_S
        if answer.deadline_s is None:
            answer.deadline_s = time.monotonic() + self.options.resume_wait_s

    def _retry_waiting(self) -> None:
        now_s = time.monotonic()
        for answer in tuple(self._legs.journal.open.values()):
            if not answer.waits or answer.deadline_s is None:
                continue
            found = now_s >= answer.retry_s and self._dispatch.can_place(answer, silent=True)
            if answer.aborted or (now_s >= answer.deadline_s and (answer.refused is not None or not found)):
                self._legs.fail(answer, answer.refused or EngineDied(RESTARTING))
            elif found:
                answer.waits = False
                self.spawn(self._place(answer, answer.why))

    # Events of legs ----------------------------------------------------------------------------------

    def _on_event(self, answer: OngoingAnswer, leg: AnswerLeg, event: Event) -> None:
        """Take an event of a replica. It counts unless the leg was given up."""
        if leg not in answer.legs:
            return
        member = self.members[leg.replica]
        if isinstance(event, EngineDied):
            loss = LINE if isinstance(event, LineBroke) else DEATH
            self._lost(answer, leg, "drain" if member.draining else loss, event)
        elif isinstance(event, PacelineError):
            self._lost(answer, leg, "broken", event)
        elif not isinstance(event, Disconnected):
            self._on_outcome(answer, leg, event[1])
        member.heard(leg)

    def _on_outcome(self, answer: OngoingAnswer, leg: AnswerLeg, outcome: Outcome) -> None:
        if outcome.finish_reason == "cancelled":  # not by this fleet
            answer.banned.add(self.members[leg.replica].process)
            self._lost(answer, leg, "drain", EngineDied(RESTARTING))
            return
        if outcome.finish_reason == "error" and not answer.broken:
            answer.broken = True
            self._lost(answer, leg, "broken", outcome)
            return
        before = leg.spoke
        try:
            news = answer.news(leg, outcome)
        except WordsMissing as error:
            log.warning("%s", error)
            self._lost(answer, leg, DEATH, error)
            return
        if spoke := leg.spoke and not before:
            answer.forget_refusals()
            answer.deadline_s = None
        if spoke:
            self._hedging.first_token(leg.wait_s, time.monotonic() - leg.began_s)
        if news is not None:
            self._send_on(answer, leg, news)

    def _send_on(self, answer: OngoingAnswer, leg: AnswerLeg, news: Outcome) -> None:
        if answer.lost_s is not None:
            self.metrics.resume_s.observe(time.monotonic() - answer.lost_s)
            answer.lost_s = None
        self._legs.put(answer, news)
        if news.finish_reason is not None:
            self._finished(answer, leg)
        elif len(answer.legs) > 1:
            self._legs.settle(answer, leg, tokens_ahead=1 if answer.request.whole else AHEAD_TOKENS)

    def _finished(self, answer: OngoingAnswer, leg: AnswerLeg) -> None:
        self._legs.settle(answer, leg, tokens_ahead=0)
        self._dispatch.ended(answer, self.members[leg.replica])
        self._legs.end(answer, leg)
        self._legs.forget(answer)
        if self.options.audit and not answer.inexact and answer.request.keeps_text:  # it can be written again
            self._audits.offer(Audit(answer.request, tuple(answer.told), leg.replica, answer.promise))

    def _lost(self, answer: OngoingAnswer, leg: AnswerLeg, why: str, what: PacelineError | Outcome) -> None:
        """Give a leg up: another replica goes on, or the answer ends.

        what: what the client is told if the answer ends.
        """
        self._legs.drop(answer, leg)
        process = self.members[leg.replica].process
        if why not in LEAVES and not isinstance(what, QueueFull):  # else nothing says that the process is bad
            answer.banned.add(process)
        if isinstance(what, RequestError):
            self._refused(answer, leg, what)
            return
        answer.forget_refusals()
        answer.strike(leg, why, process)
        if answer.legs:  # the other leg of a hedged answer goes on
            return
        answer.lost_s, answer.why = answer.lost_s or time.monotonic(), why
        stuck = why == "broken" and not self._dispatch.can_place(answer, silent=True)
        if answer.aborted or answer.ends(why, self.options.resume) or stuck:
            self._legs.fail(answer, what)
        elif answer.strikes >= MOST_STRIKES:
            self._legs.give_up(answer)
        else:
            self.spawn(self._place(answer, why))

    def _refused(self, answer: OngoingAnswer, leg: AnswerLeg, error: RequestError) -> None:
        """Ask another replica, or tell the client.

        The replica that refused may be full, or have unloaded a drafter.
        """
        if isinstance(error, QueueFull):
            answer.refused = error
            answer.full.add(leg.replica)
        elif not answer.legs and (not answer.num_legs or not self._dispatch.any_left(answer)):
            self._legs.fail(answer, error)
            return
        if not answer.legs:
            self.spawn(self._place(answer, answer.why))

    # Watching replicas -------------------------------------------------------------------------------

    async def _tick(self, elapsed_s: float) -> None:
        for member in tuple(self.members.values()):
            member.tick(elapsed_s)
            self._look_at(member)
        self._retry_waiting()
        await self._hedge()
        await self._tail.work()
        await self._audits.work(self.members.values())
        self._tell_sum()

    def _look_at(self, member: Member) -> None:
        self.commands.level(member)
        gone, heard_s = (member.name, member.incarnation), member.heard_s
        if member.note_replaced():
            self._dispatch.forget(member.name)
            self._legs.blame(gone, heard_s)
        if member.leaves:
            self._move_all(member, "drain")
        if not member.num_legs:
            self._warm(member)
        hangs = member.silent or member.ready is None  # a process that has ended has no answers any more
        if hangs and member.num_legs and (count := self._move_all(member, HANG)):
            log.error("replica %s is silent; others go on with its %d answers", member.name, count)

    def _move_all(self, member: Member, why: str) -> int:
        """Move the answers that another replica can go on with; return their number.

        An answer that is still written moves once another replica has read it; that needs kept pages. With
        --resume off, answers of which something was told stay: the replica may well finish them.
        """
        count = 0
        keeps = why in MOVES and (ready := self.ready) is not None and ready.keeps_pages
        for answer, leg in self._legs.journal.on(member.name):
            reads = keeps and leg.spoke and len(answer.legs) == 1
            if answer.ends(why, self.options.resume) or leg not in answer.legs or (reads and leg.is_kept):
                continue
            if self._dispatch.can_place(answer, {member.name}):
                count += 1
                if reads:
                    leg.being_read = True
                    self.spawn(hand_over(self._dispatch, answer, leg, partial(self._give, answer, why)))
                else:
                    self._lost(answer, leg, why, EngineDied(RESTARTING))
        return count

    async def _hedge(self) -> None:
        """Give answers whose first token is late to a second replica, too."""
        for answer, leg in self._hedging.late(self._legs.journal.open.values()):
            if (found := self._dispatch.second(answer, leg)) and await self._begin_leg(answer, found[0], None):
                self._hedging.left -= 1

    # Messages of replicas ----------------------------------------------------------------------------

    def _tell_sum(self) -> None:
        """Tell the sum of all counters; once a tick only, as a sum takes time."""
        if (whole := self.snapshot) is not None:
            tell_costs(self.members.values(), whole.stats)
            if self.on_snapshot is not None:
                self.on_snapshot(whole)

    def _language(self, language: Language) -> None:
        if self.on_language is not None and not self.first_ready.done():
            self.on_language(language)

    def _is_ready(self, member: Member) -> None:
        """Take in an engine that has loaded; what grammars need is made before it serves."""
        member.note_ready()
        self.commands.level(member)
        tell_of_mixed(self.members.values(), member, any_promise=self.options.resume == ANY)
        self._warm(member)

    def _renewed(self, member: Member, before: str) -> None:
        self._legs.renew(member, before)
        self._dispatch.forget(member.name)  # no page of the older weights is used

    def _warm(self, member: Member) -> None:
        """Have a replica make what grammars need, once, if any request had a grammar."""
        if self._legs.journal.had_grammar and not member.warmed and member.serves:
            member.warmed, member.warms = True, member.warms + 1
            self.spawn(warm_up(member))

    def _loaded(self, member: Member, done: asyncio.Future[Ready]) -> None:
        """Note that a replica has loaded, or cannot."""
        if done.cancelled():
            return
        failed = done.exception()
        if self.first_ready.done():
            if failed is not None:
                log.error("replica %s could not be started: %s", member.name, failed)
        elif failed is None:
            self.first_ready.set_result(done.result())
        elif all(other.engines.first_ready.done() for other in self.members.values()):  # no other may still load
            self.first_ready.set_exception(failed)
