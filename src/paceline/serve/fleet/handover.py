"""Handover: what a replica does before it goes on with the answers of another.

A replica that is told to leave goes on for a while. Meanwhile another one reads its answers: it computes the KV of
what the clients have. So an answer pauses only for the tokens that were written during its reading, not for a
prefill of all. A replica that was started anew first makes what grammars need.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.core.errors import EngineDied, QueueFull
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.params import Grammar, SamplingParams
from paceline.core.request_nouns import Request
from paceline.serve.fleet.index import page_hashes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paceline.serve.engines import Event
    from paceline.serve.fleet.dispatch import Dispatch
    from paceline.serve.fleet.journal import AnswerLeg, OngoingAnswer
    from paceline.serve.fleet.member import Member

    Give = Callable[[Member], Awaitable[None]]

LOOK_S = 0.1  # between two looks if the answer is still written
MOST_READS = 4  # readings of an answer; each reads what was told during the last one
LITTLE = 2 * PAGE_TOKENS  # tokens that need not be read ahead
TURN_S = 2.0  # how long an answer waits while its next replica reads others
AGAIN_S = 1.0  # wait before another replica is asked to read
WARM_S = 30.0  # longest wait for a replica to make its vocabulary for grammars
WARMING = Request("warms-grammars", (0,), SamplingParams(max_tokens=1, grammar=Grammar("regex", "a")), 0)


async def hand_over(dispatch: Dispatch, answer: OngoingAnswer, leg: AnswerLeg, give: Give) -> None:
    """Have another replica read an answer, then give it that answer.

    leg: the part that is still written. The answer stays there if the reading fails.
    """
    try:
        found = dispatch.choose(answer, {leg.replica})
        if found is None:
            await asyncio.sleep(AGAIN_S)
        else:
            await AheadReading(dispatch, answer, leg, found[0]).run(give)
    finally:
        leg.being_read = False


@dataclass(frozen=True, slots=True, eq=False)
class AheadReading:
    """A replica that reads an answer while another one writes it."""

    dispatch: Dispatch
    answer: OngoingAnswer
    leg: AnswerLeg  # the part that is still written
    member: Member  # replica that reads

    @property
    def holds(self) -> bool:
        """True while the answer may be given to the replica."""
        writes = self.leg in self.answer.legs and not self.answer.aborted
        return writes and self.member.able and self.dispatch.fits(self.answer, self.member)

    async def run(self, give: Give) -> None:
        """Read the answer and give it, or wait before another try.

        A replica reads one answer at a time. So each answer moves before the next prefill begins.
        """
        member, length = self.member, self.answer.length
        tokens = self.dispatch.fresh_tokens(self.answer, member)
        member.begin(tokens, length)
        try:
            if not await _taken(member.reading):
                return  # another replica may be free now
            try:
                if await self._read_all() and self.holds:
                    await give(member)
                    return
            finally:
                member.reading.release()
        finally:
            member.end(tokens, length)
        await asyncio.sleep(AGAIN_S)

    async def _read_all(self) -> bool:
        """Read the answer, then what was told meanwhile, until that is little."""
        for _ in range(MOST_READS):
            before = self.answer.num_tokens
            if not await self._read():
                return False
            if self.answer.num_tokens - before < LITTLE:
                break
        return True

    async def _read(self) -> bool:
        """Read the answer's full pages; False if the replica told no token."""
        answer, member = self.answer, self.member
        if not self.holds:
            return False
        hashes = page_hashes(answer.request, answer.told)
        if not hashes:
            return True
        heard: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        request = answer.continued(answer.new_leg(member.name, member.promise))
        try:
            reads = await member.engines.submit([request], partial(_note, heard))
        except EngineDied:
            return False
        while self.holds and not heard.done():
            await asyncio.wait({heard}, timeout=LOOK_S)
        await reads.close()
        if not self.holds or not heard.done():
            return False
        if not _is_token(event := heard.result()):
            self.leg.num_unread += not isinstance(event, (QueueFull, EngineDied))
            return False
        self.dispatch.read(answer, member, hashes)
        return True


async def _taken(lock: asyncio.Lock) -> bool:
    """Wait for a turn; False if none came in time."""
    try:
        async with asyncio.timeout(TURN_S):
            return await lock.acquire()
    except TimeoutError:
        return False


async def warm_up(member: Member) -> None:
    """Have a replica make its vocabulary for grammars; later all its rows would wait.

    The replica is out of service until then.
    """
    heard: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
    name = f"{WARMING.request_id}-{secrets.token_hex(4)}"  # another front may ask for the same
    try:
        warms = await member.engines.submit([replace(WARMING, request_id=name)], partial(_note, heard))
        await asyncio.wait({heard}, timeout=WARM_S)
        await warms.close()
    except EngineDied:
        pass
    finally:
        member.warms -= 1


def _note(heard: asyncio.Future[Event], event: Event) -> None:
    """Note the first token, or an end without one; a step that begins is neither."""
    begins = isinstance(event, tuple) and not (event[1].token_ids or event[1].finish_reason)
    if not heard.done() and not begins:
        heard.set_result(event)


def _is_token(event: Event) -> bool:
    return isinstance(event, tuple) and event[1].finish_reason in (None, "stop", "length")
