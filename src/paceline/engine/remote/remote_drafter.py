"""A drafter in another process, as the engine calls it.

A row is sent when it is first drafted for, then its gained tokens whenever it is drafted for. So a restarted
process needs no special care: it knows no row, its stores are empty, and it catches up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.core.errors import PacelineError
from paceline.core.nouns import BROKEN, NO_DRAFT, PAGE_TOKENS, Draft, RowDraft
from paceline.draft.drafter import DrafterUnavailable, StoresLost
from paceline.engine.assembly.placement import DEADLINE_S
from paceline.engine.pages import pages_for
from paceline.engine.remote.protocol import (
    BeginDrafter,
    ChannelClosed,
    Commit,
    Done,
    DraftReply,
    Forget,
    NewRow,
    Propose,
    RowUpdate,
    ValidLens,
)
from paceline.engine.remote.supervisor import ProcessSupervisor
from paceline.engine.wire import Submit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.seam import RowView
    from paceline.core.nouns import Batch, Plan, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.engine.remote.protocol import RemoteRowDraft, ToDrafter, ToEngine

MAX_FAILURES = 4  # failures in a row of a process's drafter, after which the process is started anew
AnswerT = TypeVar("AnswerT", bound="ToEngine")


@dataclass(slots=True)
class _KnownRow:
    """The process's knowledge of a row."""

    length: int
    num_full_pages: int = 0  # known pages that are full of known tokens, and so do not change


class RemoteDrafter:
    """Drafter in another process, each call with a deadline; see `Drafter`. Lost processes are restarted."""

    def __init__(self, name: str, begin: BeginDrafter, rows: RowView, deadline_s: float = DEADLINE_S) -> None:
        """Start the process. rows: the engine's. Raises what loading the drafter there raises."""
        self.name = name
        self.supervisor = _started(begin, name)
        self.needs = replace(self.supervisor.first.needs, instant=False)  # each answer crosses processes
        self._on = str(begin.config.placement.draft or "the engine's cores")
        self._failures = 0  # answers in a row which said that the drafter failed
        self._rows, self._deadline_s = rows, deadline_s
        self._requests: dict[int, Request] = {}  # by row
        self._valid_lens: dict[int, Mapping[str, int]] = {}  # by row
        self._known: dict[int, _KnownRow] = {}  # by row
        self._ended: list[int] = []  # rows that the process knows and that have been released
        self._open: set[int] = set()  # rows drafted for whose outcome was not sent yet

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Note a new request in a row."""
        self._requests[row], self._valid_lens[row] = request, dict(valid_lens)

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Draft in the process. Raises `DrafterUnavailable` while there is none."""
        depth = {r.row: min(plan.k(r.row), r.max_drafts) for r in batch.rows}
        wanted = {row: k for row, k in depth.items() if k > 0}
        if not wanted:
            return Draft((NO_DRAFT,) * len(batch.rows))
        if self.supervisor.running() is None:
            raise DrafterUnavailable
        self._open |= wanted.keys()
        new = tuple(self._new_row(row) for row in wanted if row not in self._known)
        updates = tuple(self._update(row, ahead=k) for row, k in wanted.items())
        ended = tuple(self._ended)
        self._ended = []
        stops = tuple(map(plan.stop, wanted))
        reply = self._ask(Propose(ended, new, updates, tuple(wanted.values()), stops), DraftReply, len(wanted))
        drafts = dict(zip(wanted, reply.rows, strict=True))
        return Draft(tuple(self._row_draft(drafts.get(r.row)) for r in batch.rows))

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Send the outcomes of rows that the process drafted for; other rows need no trim."""
        places = {r.row: index for index, r in enumerate(batch.rows) if r.row in self._open}
        rows = list(places)
        self._open.difference_update(rows)
        if not rows or self.supervisor.running() is None:
            return
        chosen = tuple(tuple(scores.chosen[slice(*scores.cu_len[i : i + 2])].tolist()) for i in places.values())
        reply = self._ask(Commit(tuple(self._update(row) for row in rows), chosen), ValidLens, len(rows))
        for row, lens in zip(rows, reply.rows, strict=True):
            self._valid_lens[row] = dict(zip(self.needs.stores, lens, strict=False))

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Leading tokens of a row that each store held after its last commit."""
        return self._valid_lens[row]

    def release(self, row: int) -> None:
        """Note that a row's request has ended or was preempted."""
        del self._requests[row], self._valid_lens[row]
        self._open.discard(row)
        if self._known.pop(row, None):
            self._ended.append(row)

    def forget(self) -> None:
        """Drop what was learnt across requests."""
        if self.supervisor.running() is not None:
            self._ask(Forget(), Done)

    def report(self) -> Mapping[str, Any]:
        """Return what was chosen, for the start-up banner."""
        return {**self.supervisor.first.report, "on": f"{self._on}, in a process of its own"}

    def _new_row(self, row: int) -> NewRow:
        request, tokens = self._requests[row], self._rows.tokens(row)
        written = tuple(tokens[len(request.prompt_ids) :].tolist())
        self._known[row] = _KnownRow(len(tokens))
        return NewRow(row, Submit.of(_anonymous(request)), written, tuple(self._valid_lens[row].values()))

    def _update(self, row: int, ahead: int | None = None) -> RowUpdate:
        """Return a row's gain. ahead: tokens behind the gain that need pages; None: no pages."""
        known, tokens = self._known[row], self._rows.tokens(row)
        new = tokens[known.length :]
        gained = tuple(new[new != BROKEN].tolist())  # BROKEN is the last token of an answer with an error
        known.length = len(tokens)
        if ahead is None:
            return RowUpdate(row, gained)
        num_kept = known.num_full_pages
        known.num_full_pages = len(tokens) // PAGE_TOKENS
        pages = self._rows.page_ids(row, num_kept, pages_for(len(tokens) + ahead))
        return RowUpdate(row, gained, num_kept, tuple(pages))

    def _row_draft(self, found: RemoteRowDraft | None) -> RowDraft:
        if found is None or not found.token_ids:
            return NO_DRAFT
        return RowDraft(found.token_ids, self.name, found.confidence)

    def _ask(self, message: ToDrafter, kind: type[AnswerT], num_rows: int = 0) -> AnswerT:
        """Ask the process. Raises `StoresLost` if the process ended."""
        process = self.supervisor.running()
        assert process is not None
        try:
            try:
                answer = process.ask(message, kind, self._deadline_s)
            except PacelineError as error:
                self._failures += 1
                if self._failures < MAX_FAILURES:
                    raise
                raise ChannelClosed(f"it failed {self._failures} times in a row: {error}") from error
            self._failures = 0
            if len(getattr(answer, "rows", ())) != num_rows:
                raise ChannelClosed("it answered for other rows")
        except ChannelClosed as error:
            self._lose(str(error))
            raise StoresLost from None
        return answer

    def _lose(self, why: str) -> None:
        self._failures = 0
        self.supervisor.end(why)
        self._known.clear()
        self._ended.clear()
        self._open.clear()
        self._valid_lens = {row: dict.fromkeys(lens, 0) for row, lens in self._valid_lens.items()}


def _started(begin: BeginDrafter, name: str) -> ProcessSupervisor:
    try:
        return ProcessSupervisor(begin, name)
    except ChannelClosed as error:
        raise PacelineError(f"the process of drafter {name} was lost while it loaded: {error}") from None


def _anonymous(request: Request) -> Request:
    """Return what a drafter may know of a request: how its tokens are chosen.

    The grammar is left out: it is long, and only the engine reads it, where the target's rows are.
    """
    params = replace(request.params, stop=(), grammar=None)
    salt = sha256(request.salt.encode()).hexdigest() if request.salt else ""  # tells users apart, hides the salt
    return replace(request, request_id="any", params=params, salt=salt, speculation=None, told=())
