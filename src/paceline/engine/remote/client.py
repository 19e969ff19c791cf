"""A drafter in another process, as the engine sees it.

What a row has gained is told when it is drafted for, and a row when it is first drafted for. So nothing is special
about a process that was started again: it has been told of no row, its stores are empty, and it catches up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.core.errors import PacelineError
from paceline.core.nouns import BROKEN, NO_DRAFT, PAGE_TOKENS, Draft, RowDraft
from paceline.draft.drafter import DrafterUnavailable, StoresLost
from paceline.engine.assembly.placement import DEADLINE_S
from paceline.engine.pages import pages_for
from paceline.engine.remote.channel import LineDead
from paceline.engine.remote.messages import (
    BeginDrafter,
    Birth,
    Commit,
    Done,
    DraftReply,
    Forget,
    Held,
    Propose,
    RowNews,
)
from paceline.engine.remote.supervisor import ProcessSupervisor
from paceline.engine.wire import Submit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.seam import RowView
    from paceline.core.nouns import Batch, Plan, Request, Scores, Verdict
    from paceline.engine.remote.messages import Guesses, ToDrafter, ToEngine

AnswerT = TypeVar("AnswerT", bound="ToEngine")


@dataclass(slots=True)
class _Told:
    """What the process knows of a row."""

    length: int
    num_pages: int = 0  # full of known tokens: they stay


class RemoteDrafter:
    """Drafts in another process, each call with a deadline; see `Drafter`. One that is lost is started again."""

    def __init__(self, name: str, begin: BeginDrafter, rows: RowView, deadline_s: float = DEADLINE_S) -> None:
        """Start the process. rows: the engine's. Raises what building the drafter there raises."""
        self.name = name
        self.lives = _first(begin, name)
        self.needs = self.lives.first.needs
        self._on = str(begin.config.placement.draft)
        self._rows, self._deadline_s = rows, deadline_s
        self._requests: dict[int, Request] = {}
        self._held: dict[int, Mapping[str, int]] = {}
        self._told: dict[int, _Told] = {}
        self._ended: list[int] = []  # rows it was told of, and not yet that they have ended
        self._open: set[int] = set()  # rows drafted for, whose outcome it does not know

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """A request was born in a row."""
        self._requests[row], self._held[row] = request, dict(valid_lens)

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Draft in the process. Raises `DrafterUnavailable` while there is none."""
        depth = {r.row: min(plan.k(r.row), r.max_drafts) for r in batch.rows}
        wanted = {row: k for row, k in depth.items() if k > 0}
        if not wanted:
            return Draft((NO_DRAFT,) * len(batch.rows))
        if self.lives.living() is None:
            raise DrafterUnavailable
        self._open |= wanted.keys()
        born = tuple(self._birth(row) for row in wanted if row not in self._told)
        news = tuple(self._news(row, ahead=k) for row, k in wanted.items())
        ended, self._ended = tuple(self._ended), []
        stops = tuple(map(plan.stop, wanted))
        drafted = self._ask(Propose(ended, born, news, tuple(wanted.values()), stops), DraftReply, len(wanted))
        drafts = dict(zip(wanted, drafted.rows, strict=True))
        return Draft(tuple(self._draft(drafts.get(r.row)) for r in batch.rows))

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Tell what became of rows that were drafted for; of others there is nothing to trim."""
        places = {r.row: index for index, r in enumerate(batch.rows) if r.row in self._open}
        rows = list(places)
        self._open.difference_update(rows)
        if rows and self.lives.living() is not None:
            said = tuple(tuple(scores.chosen[slice(*scores.cu_len[i : i + 2])].tolist()) for i in places.values())
            held = self._ask(Commit(tuple(self._news(row) for row in rows), said), Held, len(rows))
            for row, lens in zip(rows, held.rows, strict=True):
                self._held[row] = dict(zip(self.needs.stores, lens, strict=False))

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Leading tokens of a row that the stores held when it was last told of the row."""
        return self._held[row]

    def release(self, row: int) -> None:
        """The row's request has ended or was preempted."""
        del self._requests[row], self._held[row]
        self._open.discard(row)
        if self._told.pop(row, None):
            self._ended.append(row)

    def forget(self) -> None:
        """Drop whatever was learnt across requests."""
        if self.lives.living() is not None:
            self._ask(Forget(), Done)

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return {**self.lives.first.report, "on": f"{self._on}, in a process of its own"}

    def _birth(self, row: int) -> Birth:
        request, known = self._requests[row], self._rows.tokens(row)
        written = tuple(known[len(request.prompt_ids) :].tolist())
        self._told[row] = _Told(len(known))
        return Birth(row, Submit.of(_anonymous(request)), written, tuple(self._held[row].values()))

    def _news(self, row: int, ahead: int | None = None) -> RowNews:
        """Return what a row has gained. ahead: tokens behind it that need a page; None: pages are not told."""
        told, known = self._told[row], self._rows.tokens(row)
        new = known[told.length :]
        gained = tuple(new[new != BROKEN].tolist())  # behind an answer that ends with an error
        told.length = len(known)
        if ahead is None:
            return RowNews(row, gained)
        first, told.num_pages = told.num_pages, len(known) // PAGE_TOKENS
        pages = self._rows.page_ids(row, first, pages_for(len(known) + ahead))
        return RowNews(row, gained, first, tuple(pages))

    def _draft(self, guesses: Guesses | None) -> RowDraft:
        if guesses is None or not guesses.token_ids:
            return NO_DRAFT
        return RowDraft(guesses.token_ids, self.name, guesses.confidence)

    def _ask(self, message: ToDrafter, kind: type[AnswerT], num_rows: int = 0) -> AnswerT:
        """Ask the process. Raises `StoresLost` if that was its end."""
        life = self.lives.living()
        assert life is not None
        try:
            answer = life.ask(message, kind, self._deadline_s)
            if len(getattr(answer, "rows", ())) != num_rows:
                raise LineDead("it answered for other rows")
        except LineDead as error:
            self._lose(str(error))
            raise StoresLost from None
        return answer

    def _lose(self, why: str) -> None:
        self.lives.end(why)
        self._told.clear()
        self._ended.clear()
        self._open.clear()
        self._held = {row: dict.fromkeys(held, 0) for row, held in self._held.items()}


def _first(begin: BeginDrafter, name: str) -> ProcessSupervisor:
    try:
        return ProcessSupervisor(begin, name)
    except LineDead as error:
        raise PacelineError(f"the process of drafter {name} was lost while it loaded: {error}") from None


def _anonymous(request: Request) -> Request:
    """Return what a drafter may know of a request: how its tokens are chosen."""
    params = replace(request.params, stop=())
    return replace(request, request_id="any", params=params, salt="", speculation=None)
