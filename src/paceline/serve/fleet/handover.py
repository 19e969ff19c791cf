"""Handover: what a replica does before it goes on with the answers of another.

One that is told to leave goes on for a while. Another one computes what the client has meanwhile, so that the
answer pauses for the tokens written in that time, and not for a prefill of all. One that was started anew makes
what grammars need.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from paceline.core.errors import EngineDied
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
MOST_READS = 4  # each is of what was told during the last one
LITTLE = 2 * PAGE_TOKENS  # tokens that need not be read ahead
AGAIN_S = 1.0  # before another replica is asked to read
WARM_S = 30.0  # for a vocabulary
WARMING = Request("warms-grammars", (0,), SamplingParams(max_tokens=1, grammar=Grammar("regex", "a")), 0)


async def hand_over(dispatch: Dispatch, answer: OngoingAnswer, leg: AnswerLeg, give: Give) -> None:
    """Have another replica read an answer, then give it that one.

    leg: that is written meanwhile. After a replica that cannot read it, it stays there for a while.
    """
    try:
        found = dispatch.choose(answer, {leg.replica})
        if found is None or not await _read_and_give(dispatch, answer, leg, found[0], give):
            leg.num_unread += 1
            await asyncio.sleep(AGAIN_S)
    finally:
        leg.leaves = False


async def _read_and_give(
    dispatch: Dispatch, answer: OngoingAnswer, leg: AnswerLeg, member: Member, give: Give
) -> bool:
    """Give an answer to a replica once it has read it; False if it cannot.

    It reads one at a time: each is then given before the next one's prefill can delay it.
    """
    waits = answer.new_leg(member.name, member.promise)
    waits.began_s, waits.backlog = time.monotonic(), dispatch.fresh_tokens(answer, member)
    member.begin(waits)
    try:
        async with member.reading:
            if not await _read_all(dispatch, answer, leg, member):
                return False
            if leg in answer.legs:
                await give(member)
            return True
    finally:
        member.end(waits)


async def _read_all(dispatch: Dispatch, answer: OngoingAnswer, leg: AnswerLeg, member: Member) -> bool:
    """Have a replica read an answer, then what was told meanwhile, until it is little."""
    for _ in range(MOST_READS):
        before = answer.num_tokens
        if not await _read(dispatch, answer, leg, member):
            return False
        if answer.num_tokens - before < LITTLE:
            break
    return True


async def _read(dispatch: Dispatch, answer: OngoingAnswer, leg: AnswerLeg, member: Member) -> bool:
    """Have a replica read an answer's full pages; False if it told no token."""
    if leg not in answer.legs or not member.alive:
        return False
    hashes = page_hashes(answer.request, answer.told)
    if not hashes:
        return True
    told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    request = answer.continued(answer.new_leg(member.name, member.promise))
    try:
        reads = await member.engines.submit([request], partial(_heard, told))
    except EngineDied:
        return False
    while leg in answer.legs and member.alive and not told.done():
        await asyncio.wait({told}, timeout=LOOK_S)
    await reads.close()
    if leg not in answer.legs or not told.done() or not told.result():
        return False
    dispatch.read(answer, member, hashes)
    return True


async def warm_up(member: Member) -> None:
    """Have a replica make its vocabulary for grammars, for which all its rows would wait."""
    told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    member.warms = True
    try:
        warms = await member.engines.submit([WARMING], partial(_heard, told))
        await asyncio.wait({told}, timeout=WARM_S)
        await warms.close()
    except EngineDied:
        pass
    finally:
        member.warms = False


def _heard(told: asyncio.Future[bool], event: Event) -> None:
    """Note a token, or an end without one; a step that begins is neither."""
    if told.done():
        return
    if not isinstance(event, tuple):
        told.set_result(False)
    elif event[1].token_ids or event[1].finish_reason is not None:
        told.set_result(event[1].finish_reason in (None, "stop", "length"))
