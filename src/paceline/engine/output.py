"""Output of requests: stops, text, and the outcomes for their clients.

`StopChecker` takes tokens that cannot end an answer, `stops.py` tokens that may. `Response` adds the counts of an
open request. `OutputQueue` holds what answers gained until the loop has time to make it an outcome;
`answer_queue.py` adds how answers begin and end.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline import kernels
from paceline.core.figures import Spent
from paceline.core.request_nouns import Outcome
from paceline.engine.notes import NoteBook
from paceline.engine.stops import StopCheck, TokenwiseChecker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import RowDraft, RowVerdict
    from paceline.core.request_nouns import Request, TokenLogprobs
    from paceline.engine.request_state import RequestState
    from paceline.model.detokenizer import Detokenizer
    from paceline.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FAILED = "request %s failed"


class StopChecker(TokenwiseChecker):
    """Stop detection: take a request's tokens up to the first that ends it.

    The result is as if each token had come alone. Tokens that cannot end it are turned into text on demand.
    """

    __slots__ = ("_unread",)

    def __init__(self, request: Request, eos_ids: frozenset[int], detokenizer: Detokenizer) -> None:
        super().__init__(request, eos_ids, detokenizer)
        self._unread: Sequence[int] = ()  # tokens whose text was not made yet; none of them ends the answer

    def take(self, token_ids: Sequence[int]) -> StopCheck:
        """Add tokens until one of them ends the answer; tokens after it are dropped."""
        after = self.num_tokens + len(token_ids)
        if after >= self.most_tokens or not self._ending_ids.isdisjoint(token_ids):
            if self._unread:
                self._read()
            return self.take_each(token_ids)
        self._unread = [*self._unread, *token_ids] if self._unread else token_ids
        self.num_tokens = after
        return StopCheck(len(token_ids))

    def text(self) -> str:
        """Return the text since the last call that no later token can take back."""
        if self._unread:
            self._read()
        text, self._text = self._text, ""
        return text

    def flush(self) -> str:
        """Return the text since the last call, held-back text included; nothing may follow it."""
        return self.text() + self._all_held()

    def _read(self) -> None:
        unread, self._unread = self._unread, ()
        try:
            self._text += self._detokenizer.push(unread)
        except Exception:
            self.num_tokens -= len(unread)  # tokens that cannot be read do not count as written
            raise


def checker_of(request: Request, tokenizer: Tokenizer) -> StopChecker:
    """Return the checker of a request's answer."""
    return StopChecker(request, frozenset(tokenizer.eos_ids), tokenizer.detokenizer(within=request.within))


@dataclass(slots=True, eq=False)
class Response:
    """The answer of an open request so far, and what speculation did for it."""

    request_id: str
    state: RequestState
    checker: StopChecker
    decode_passes: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    changed_tokens: int = 0
    changed_nats: float = 0.0
    kept_by: dict[str, int] = field(default_factory=dict)  # accepted tokens by drafter
    prompt_logprobs: list[TokenLogprobs] | None = None  # those known so far; None: not asked for, or handed out
    weights: list[tuple[int, str]] = field(default_factory=list)  # as in `Figures`
    started: bool = False  # True once an outcome was made
    told_passes: int = 0  # decode passes that the client knows of
    told_drafts: int = 0  # drafted tokens that the client knows of

    def take(self, token_ids: Sequence[int]) -> StopCheck:
        """Add a pass's tokens to the answer. An error ends this request, never another."""
        try:
            return self.checker.take(token_ids)
        except Exception:
            log.exception(FAILED, self.request_id)
            return StopCheck(0, "error")

    def count_pass(self, proposed: RowDraft, draft: RowDraft, num_accepted: int, num_tokens: int) -> None:
        """Count one decode pass. draft: what was verified. num_accepted, num_tokens: up to the stop."""
        beside = draft.num_branch_tokens
        self.decode_passes += 1
        self.decoded_tokens += num_tokens
        self.drafted_tokens += len(proposed) + beside
        self.verified_tokens += len(draft) + beside
        if num_accepted and proposed.drafter is not None:
            self.accepted_tokens += num_accepted
            self.kept_by[proposed.drafter] = self.kept_by.get(proposed.drafter, 0) + num_accepted

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Return the log-probabilities of the prompt, once."""
        scored, self.prompt_logprobs = self.prompt_logprobs, None
        return None if scored is None else tuple(scored)

    def spent(self, num_tokens: int) -> Spent | None:
        """Return the counts to tell with an outcome; None where `Spent.after` finds them."""
        first, self.started = not self.started, True
        self.told_passes += max(0, num_tokens - first)
        plain = self.decode_passes == self.told_passes and self.drafted_tokens == self.told_drafts
        if plain and not (first and self.state.cached_len):
            return None
        self.told_passes, self.told_drafts = self.decode_passes, self.drafted_tokens
        return Spent(
            self.state.cached_len,
            self.decode_passes,
            self.decoded_tokens,
            self.drafted_tokens,
            self.verified_tokens,
            self.accepted_tokens,
            self.changed_tokens,
            self.changed_nats,
        )


class OutputQueue:
    """Open responses, their gains of the last step, and the outcomes for the clients.

    A gain becomes an outcome at the next `flush`, so that its text is made while a pass of the target runs. The
    first tokens of an answer become an outcome at once, as clients wait for them; so does its end.
    """

    def __init__(self) -> None:
        self.responses: dict[str, Response] = {}  # of open requests, by request id
        self.gains: list[tuple[Response, Sequence[int], RowVerdict]] = []  # at most one for each response
        self.outcomes: list[Outcome] = []  # in the order in which clients should see them
        self.book = NoteBook()

    def end(self, response: Response, check: StopCheck, text: str) -> None:
        """Close a response, see `AnswerQueue`."""
        raise NotImplementedError

    def put(self, response: Response, token_ids: Sequence[int], verdict: RowVerdict) -> None:
        """Queue a response's tokens. Its first become an outcome at once."""
        if response.started:
            self.gains.append((response, token_ids, verdict))
        else:
            self._emit(response, token_ids, verdict)

    def flush(self) -> None:
        """Make outcomes of all gains. A response whose text cannot be made ends here."""
        gains, self.gains = self.gains, []
        for gain in kernels.make_outcomes(gains, self.outcomes, Outcome):
            self._emit(*gain)

    def take_outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        outcomes, self.outcomes = self.outcomes, []
        if self.book.wanted:
            self.book.attach(outcomes)
        return outcomes

    def _emit(self, response: Response, token_ids: Sequence[int], verdict: RowVerdict) -> None:
        try:
            text = response.checker.text()
        except Exception:
            log.exception(FAILED, response.request_id)
            self.end(response, StopCheck(0, "error"), "")
            return
        self.outcomes.append(
            Outcome(
                response.request_id,
                tuple(token_ids),
                text,
                logprobs=logprobs_of(verdict, len(token_ids)),
                prompt_logprobs=response.take_prompt_logprobs(),
                start=response.checker.num_tokens - len(token_ids),
                spent=response.spent(len(token_ids)),
            )
        )


def logprobs_of(verdict: RowVerdict, count: int) -> tuple[TokenLogprobs, ...] | None:
    """Return the log-probabilities of a row's first `count` tokens; None if not requested."""
    return None if verdict.logprobs is None else tuple(verdict.logprobs[:count])
