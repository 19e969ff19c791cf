"""A drafter in a process of its own: load, then answer what the engine asks until it is gone.

Started by `life` as `python -m paceline.engine.remote.process SOCKET MEMORY`, the descriptors of its end of the
line. It keeps a copy of the rows it is told of, beside which a drafter runs as it would beside the engine's own.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.nouns import Admission, Batch, BatchRow, Plan, RowPlan, RowVerdict, Scores, Verdict
from paceline.core.system import end_with_parent, stay_on
from paceline.engine.assembly.build import build_apart
from paceline.engine.remote.channel import Channel, LineDead
from paceline.engine.remote.messages import (
    BeginDrafter,
    Commit,
    Done,
    DraftReply,
    Forget,
    Guesses,
    Held,
    Propose,
    Up,
    decode_to_drafter,
)
from paceline.engine.wire import Failed, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backend.rows import Rows
    from paceline.core.nouns import RowDraft
    from paceline.draft.drafter import Drafter
    from paceline.engine.remote.messages import Birth, RowNews, ToDrafter, ToEngine

    Answer = Callable[[], ToEngine]

log = logging.getLogger(__name__)


class Host:
    """A drafter, the rows that it knows of, and what it is asked."""

    def __init__(self, drafter: Drafter, rows: Rows) -> None:
        self._drafter, self._rows = drafter, rows
        self._takers: dict[type, Callable[[Any], Answer]] = {
            Propose: self._propose,
            Commit: self._commit,
            Forget: self._forget,
        }

    def answer(self, message: ToDrafter) -> ToEngine:
        """Take in what a message tells, and answer it. What the drafter raises is the answer then."""
        ask = self._takers[type(message)](message)
        try:
            return ask()
        except Exception as error:
            log.debug("the drafter failed", exc_info=True)
            return _failed(error)

    def _propose(self, message: Propose) -> Answer:
        for row in message.ended:
            self._drafter.release(row)
        for birth in message.born:
            self._bear(birth)
        self._take(message.rows)
        planned = zip(message.rows, message.ks, message.stops, strict=True)
        plan = Plan({n.row: RowPlan(self._drafter.name, k, stop) for n, k, stop in planned})
        batch = Batch(0, tuple(_batch_row(n, k) for n, k in zip(message.rows, message.ks, strict=True)))
        return lambda: DraftReply(tuple(map(_guesses, self._drafter.propose(batch, plan).rows)))

    def _commit(self, message: Commit) -> Answer:
        batch, verdict = self._take(message.rows)
        cu_len = (0, *accumulate(map(len, message.said)))
        scores = Scores(cu_len, (), np.array([*chain.from_iterable(message.said)], np.int64))

        def commit() -> Held:
            self._drafter.commit(batch, scores, verdict)
            return Held(tuple(tuple(self._drafter.valid_lens(n.row).values()) for n in message.rows))

        return commit

    def _forget(self, message: Forget) -> Answer:
        def forget() -> Done:
            self._drafter.forget()
            return Done()

        return forget

    def _bear(self, birth: Birth) -> None:
        request = birth.request.request()
        known = (*request.prompt_ids, *birth.written)
        born = Admission(birth.row, request, known, cached_len=len(known) - 1, pages=())
        self._rows.apply(Batch(0, (), (born,)))
        held = dict(zip(self._drafter.needs.stores, birth.held, strict=True))
        self._drafter.admit(birth.row, request, held)

    def _take(self, news: Sequence[RowNews]) -> tuple[Batch, Verdict]:
        """Bring rows up to date, as the engine's own are."""
        batch = Batch(0, tuple(map(_batch_row, news)))
        gained = [n for n in news if n.token_ids]
        self._rows.apply(batch)
        self._rows.commit(
            Batch(0, tuple(map(_batch_row, gained))), Verdict(tuple(RowVerdict(n.token_ids) for n in gained))
        )
        return batch, Verdict(tuple(RowVerdict(n.token_ids, max(0, len(n.token_ids) - 1)) for n in news))


def _batch_row(news: RowNews, k: int = 0) -> BatchRow:
    return BatchRow(
        news.row,
        request_id="any",
        num_known=1,
        max_drafts=k,
        samples=True,
        max_len=0,
        num_kept_pages=news.first_page,
        new_pages=news.pages,
    )


def _guesses(draft: RowDraft) -> Guesses:
    confidence = None if draft.confidence is None else tuple(map(float, draft.confidence))
    return Guesses(tuple(map(int, draft.token_ids)), confidence)


def _failed(error: Exception) -> Failed:
    kind = type(error).__name__
    return Failed(kind, str(error)) if isinstance(error, PacelineError) else Failed("", f"{kind}: {error}")


def serve(channel: Channel) -> None:
    """Serve one engine until it is gone. Raises `LineDead` then."""
    begin = decode_to_drafter(channel.receive())
    assert isinstance(begin, BeginDrafter), "the first message says what to load"
    try:
        device = begin.config.placement.draft
        drafter, rows = build_apart(begin.config, begin.index, begin.num_pages)
    except Exception as error:
        channel.send(encode(_failed(error)))
        return
    if device is not None:
        stay_on(device.cores)  # only now: a config is read by the cores that there are
    channel.send(encode(Up(drafter.needs, dict(drafter.report()))))
    host = Host(drafter, rows)
    while True:
        channel.send(encode(host.answer(decode_to_drafter(channel.receive()))))


def main() -> int:
    """Entry point of the process."""
    level = os.environ.get("PACELINE_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="drafter: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # of a whole group; the engine's to answer
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    line, memory = map(int, sys.argv[1:])
    try:
        serve(Channel(socket.socket(fileno=line), memory, first=False))
    except LineDead:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
