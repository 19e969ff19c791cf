"""Handover: what a replica does before it goes on with the answers of another.

One that is told to leave goes on for a while. Another one computes what the client has meanwhile, so that the
answer pauses for the tokens written in that time, and not for a prefill of all. One that was started anew makes
what grammars need.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.core.errors import EngineDied
from paceline.core.nouns import PAGE_TOKENS
from paceline.serve.fleet.index import page_hashes

if TYPE_CHECKING:
    from paceline.core.request_nouns import Request
    from paceline.serve.engines import Event
    from paceline.serve.fleet.dispatch import Dispatch
    from paceline.serve.fleet.journal import AnswerLeg, OngoingAnswer
    from paceline.serve.fleet.member import Member

SUFFIX = "-warm"  # of a request's id
LOOK_S = 0.1  # between two looks if the answer is still written
MOST_READS = 4  # each is of what was told during the last one
LITTLE = 2 * PAGE_TOKENS  # tokens that need not be read ahead


async def read_ahead(dispatch: Dispatch, answer: OngoingAnswer, leg: AnswerLeg) -> None:
    """Have another replica read an answer, if one can go on with it.

    leg: that writes it now. Each time what was told meanwhile is read, too, until it is little.
    """
    for _ in range(MOST_READS):
        before = answer.num_tokens
        if not await _read(dispatch, answer, leg) or answer.num_tokens - before < LITTLE:
            return


async def _read(dispatch: Dispatch, answer: OngoingAnswer, leg: AnswerLeg) -> bool:
    """Have a replica read what the client has now.

    Return False if none can, or the leg has ended.
    """
    found = dispatch.choose(answer, {leg.replica})
    hashes = page_hashes(answer.request, answer.told)
    if found is None or not hashes:
        return False
    member, _ = found
    reader, spoke = answer.new_leg(member.name, member.promise), asyncio.Event()
    reader.began_s, reader.backlog = time.monotonic(), dispatch.fresh_tokens(answer, member)
    member.begin(reader)
    try:
        reads = await member.engines.submit([answer.continued(reader)], partial(_heard, spoke))
        while leg in answer.legs and not spoke.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(spoke.wait(), LOOK_S)
        await reads.close()
    except EngineDied:
        return False
    finally:
        member.end(reader)
    dispatch.read(answer, member, hashes)
    return leg in answer.legs


async def warm_up(member: Member, request: Request | None) -> None:
    """Have a replica make its vocabulary for grammars, for which all its rows would wait.

    request: one with a grammar, as it came, if any did. It is ended with its first token.
    """
    if request is None:
        return
    named = replace(request, request_id=request.request_id[-96:] + SUFFIX)
    spoke = asyncio.Event()
    with suppress(EngineDied):
        warms = await member.engines.submit([named], partial(_heard, spoke))
        await spoke.wait()
        await warms.close()


def _heard(spoke: asyncio.Event, event: Event) -> None:
    """Note a token, an end or an error.

    The first outcome only tells that a step begins.
    """
    if not isinstance(event, tuple) or event[1].token_ids or event[1].finish_reason:
        spoke.set()
