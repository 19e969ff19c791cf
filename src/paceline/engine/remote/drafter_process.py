"""A drafter's process: load the drafter, then answer the engine until it is gone.

`supervisor` starts it as `python -m paceline.engine.remote.drafter_process SOCKET MEMORY`, the descriptors of its
end of the channel. It keeps a copy of the rows that it is told of. The drafter reads it like the engine's rows.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core import logs
from paceline.core.errors import PacelineError
from paceline.core.nouns import Batch, BatchRow, Plan, RowPlan, RowVerdict, Scores, Verdict
from paceline.core.request_nouns import Admission
from paceline.core.system import end_with_parent, leave_to_parent, stay_on
from paceline.engine.assembly.build import build_apart
from paceline.engine.remote.protocol import (
    BeginDrafter,
    Channel,
    ChannelClosed,
    Commit,
    Done,
    DraftReply,
    Forget,
    Propose,
    RemoteRowDraft,
    Up,
    ValidLens,
    decode_to_drafter,
)
from paceline.engine.wire import Failed, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backend.rows import Rows
    from paceline.core.nouns import RowDraft
    from paceline.draft.drafter import Drafter
    from paceline.engine.remote.protocol import NewRow, RowUpdate, ToDrafter, ToEngine

    Answer = Callable[[], ToEngine]

log = logging.getLogger(__name__)


class DrafterHost:
    """A drafter, its copy of the rows, and the answers to the engine's messages."""

    def __init__(self, drafter: Drafter, rows: Rows) -> None:
        self._drafter, self._rows = drafter, rows
        self._handlers: dict[type, Callable[[Any], Answer]] = {
            Propose: self._propose,
            Commit: self._commit,
            Forget: self._forget,
        }

    def answer(self, message: ToDrafter) -> ToEngine:
        """Update the rows and answer a message; the drafter's error is an answer too."""
        call = self._handlers[type(message)](message)
        try:
            return call()
        except Exception as error:
            log.debug("the drafter failed", exc_info=True)
            return _failed(error)

    def _propose(self, message: Propose) -> Answer:
        for row in message.ended:
            self._drafter.release(row)
        for new in message.new:
            self._admit(new)
        self._update(message.rows)
        planned = zip(message.rows, message.ks, message.stops, strict=True)
        plan = Plan({u.row: RowPlan(self._drafter.name, k, stop) for u, k, stop in planned})
        batch = Batch(0, tuple(_batch_row(u, k) for u, k in zip(message.rows, message.ks, strict=True)))
        return lambda: DraftReply(tuple(map(_reply_of, self._drafter.propose(batch, plan).rows)))

    def _commit(self, message: Commit) -> Answer:
        batch, verdict = self._update(message.rows)
        cu_len = (0, *accumulate(map(len, message.chosen)))
        scores = Scores(cu_len, (), np.array([*chain.from_iterable(message.chosen)], np.int64))

        def commit() -> ValidLens:
            self._drafter.commit(batch, scores, verdict)
            return ValidLens(tuple(tuple(self._drafter.valid_lens(u.row).values()) for u in message.rows))

        return commit

    def _forget(self, message: Forget) -> Answer:
        def forget() -> Done:
            self._drafter.forget()
            return Done()

        return forget

    def _admit(self, new: NewRow) -> None:
        request = replace(new.request.request(), told=new.written)  # its answer may have begun before this message
        tokens = (*request.prompt_ids, *new.written)
        admission = Admission(new.row, request, tokens, cached_len=len(tokens) - 1, pages=())
        self._rows.apply(Batch(0, (), (admission,)))
        valid_lens = dict(zip(self._drafter.needs.stores, new.valid_lens, strict=True))
        self._drafter.admit(new.row, request, valid_lens)

    def _update(self, updates: Sequence[RowUpdate]) -> tuple[Batch, Verdict]:
        """Update rows; return their batch and verdict as the engine's drafters see them."""
        batch = Batch(0, tuple(map(_batch_row, updates)))
        gained = [u for u in updates if u.token_ids]
        self._rows.apply(batch)
        self._rows.commit(
            Batch(0, tuple(map(_batch_row, gained))), Verdict(tuple(RowVerdict(u.token_ids) for u in gained))
        )
        return batch, Verdict(tuple(RowVerdict(u.token_ids, max(0, len(u.token_ids) - 1)) for u in updates))


def _batch_row(update: RowUpdate, k: int = 0) -> BatchRow:
    return BatchRow(
        update.row,
        request_id="any",
        num_known=1,
        max_drafts=k,
        samples=True,
        max_len=0,
        num_kept_pages=update.num_kept_pages,
        new_pages=update.pages,
    )


def _reply_of(draft: RowDraft) -> RemoteRowDraft:
    confidence = None if draft.confidence is None else tuple(map(float, draft.confidence))
    return RemoteRowDraft(tuple(map(int, draft.token_ids)), confidence)


def _failed(error: Exception) -> Failed:
    kind = type(error).__name__
    return Failed(kind, str(error)) if isinstance(error, PacelineError) else Failed("", f"{kind}: {error}")


def serve(channel: Channel) -> None:
    """Serve one engine until it is gone. Raises `ChannelClosed` then."""
    begin = decode_to_drafter(channel.receive())
    assert isinstance(begin, BeginDrafter), "the first message says what to load"
    try:
        device = begin.config.placement.draft
        drafter, rows = build_apart(begin.config, begin.index, begin.num_pages)
    except Exception as error:
        channel.send(encode(_failed(error)))
        return
    if device is not None:
        stay_on(device.cores)  # only now: the config was checked against all cores that this process may use
    channel.send(encode(Up(drafter.needs, dict(drafter.report()))))
    host = DrafterHost(drafter, rows)
    while True:
        channel.send(encode(host.answer(decode_to_drafter(channel.receive()))))


def main() -> None:
    """Run the process."""
    logs.configure("drafter")
    leave_to_parent(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    end_with_parent()
    line, memory = map(int, sys.argv[1:])
    with suppress(ChannelClosed):
        serve(Channel(socket.socket(fileno=line), memory, first=False))


if __name__ == "__main__":
    main()
