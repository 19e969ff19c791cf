"""Handover: an answer's next replica reads it while the last one still writes.

A replica that is told to leave goes on for a while. Another one computes what the client has meanwhile, so that
the answer pauses for the tokens written in that time, and not for a prefill of all.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from paceline.core.errors import EngineDied
from paceline.serve.fleet.index import page_hashes

if TYPE_CHECKING:
    from paceline.serve.engines import Event
    from paceline.serve.fleet.dispatch import Dispatch
    from paceline.serve.fleet.journal import AnswerLeg, OngoingAnswer

LOOK_S = 0.1  # between two looks if the answer is still written


async def read_ahead(dispatch: Dispatch, answer: OngoingAnswer, leg: AnswerLeg) -> None:
    """Have another replica read an answer, if one can go on with it.

    leg: that writes it now. Returns when the other one has read it, cannot, or the leg has ended.
    """
    found = dispatch.choose(answer, {leg.replica})
    hashes = page_hashes(answer.request, answer.told)
    if found is None or not hashes:
        return
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
        return
    finally:
        member.end(reader)
    dispatch.read(answer, member, hashes)


def _heard(spoke: asyncio.Event, event: Event) -> None:
    """Note the first token, an end or an error; the first outcome only says that a step begins."""
    if not isinstance(event, tuple) or event[1].token_ids or event[1].finish_reason:
        spoke.set()
