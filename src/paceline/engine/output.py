"""Output of requests: stops, text, and the outcomes for their clients.

`StopChecker` decides where an answer ends and which of its text is safe to stream. `Response` adds the counts of
an open request. `OutputQueue` holds what answers gained until the loop has time to make it an outcome.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.nouns import BROKEN, Figures, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.nouns import FinishReason, Request, RowVerdict, TokenLogprobs
    from paceline.engine.scheduler import RequestState
    from paceline.model.detokenizer import Detokenizer

log = logging.getLogger(__name__)

FAILED = "request %s failed"
INTERNAL = "internal error while writing the answer; the log has the details"


class StopCheck(NamedTuple):
    """Result of checking the tokens of one pass for stops."""

    num_tokens: int  # kept of those offered, the one that completed a stop included
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id


class StopChecker:
    """Takes a request's tokens and stops at the first that ends it, as if each had come alone.

    Tokens that cannot end the answer are only read, that is turned into text, when their text is asked for.
    """

    def __init__(self, request: Request, eos_ids: frozenset[int], detokenizer: Detokenizer) -> None:
        params = request.params
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._ending_ids = self._eos_ids | self._stop_ids | {BROKEN}
        self._detokenizer = detokenizer
        self._num_tokens = 0
        self._unread: Sequence[int] = ()  # tokens whose text was not made yet; none of them ends the answer
        self._text = ""  # read, not handed out yet
        self._held = ""  # text that may turn out to begin a stop string

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._num_tokens

    def take(self, token_ids: Sequence[int]) -> StopCheck:
        """Add tokens until one of them ends the answer; tokens after it are dropped."""
        after = self._num_tokens + len(token_ids)
        if self._params.stop or after >= self._params.max_tokens or not self._ending_ids.isdisjoint(token_ids):
            return self.take_each(token_ids)
        self._unread = [*self._unread, *token_ids] if self._unread else token_ids
        self._num_tokens = after
        return StopCheck(len(token_ids))

    def take_each(self, token_ids: Sequence[int]) -> StopCheck:
        """Add tokens one by one: what `take` does where one of them may end the answer."""
        if self._unread:
            self._read()
        for count, token_id in enumerate(token_ids, 1):
            if token_id == BROKEN:
                self._text += self._all_held()
                return StopCheck(count - 1, "error")
            self._num_tokens += 1
            piece, finish_reason, stop_reason = self._add(token_id)
            self._text += piece
            if finish_reason is not None:
                return StopCheck(count, finish_reason, stop_reason)
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
        self._num_tokens -= len(unread)  # tokens that cannot be read do not count as written
        self._text += self._detokenizer.push(unread)
        self._num_tokens += len(unread)

    def _add(self, token_id: int) -> tuple[str, FinishReason | None, str | int | None]:
        """Add one token; return text that is safe to stream, finish reason and stop reason."""
        may_stop = self._num_tokens >= self._params.min_tokens
        if may_stop and token_id in self._eos_ids:
            return self._all_held(), "stop", None
        if may_stop and token_id in self._stop_ids:
            self._held += self._detokenizer.push((token_id,)) if self._params.include_stop else ""
            return self._all_held(), "stop", token_id
        self._held += self._detokenizer.push((token_id,))
        if self._params.stop and (found := self._find_stop(may_stop)) is not None:
            return found[0], "stop", found[1]
        if self._num_tokens >= self._params.max_tokens:
            return self._all_held(), "length", None
        return self._release(), None, None

    def _find_stop(self, may_stop: bool) -> tuple[str, str] | None:
        """Return the text up to the first stop string, and that string; None if there is none yet."""
        found = [(at, stop) for stop in self._params.stop if (at := self._held.find(stop)) >= 0]
        if not found or not may_stop:
            return None
        at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
        return self._held[: at + len(stop) if self._params.include_stop else at], stop

    def _release(self) -> str:
        """Return the held text that cannot be part of a stop string any more."""
        keep = max((_overlap(self._held, stop) for stop in self._params.stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _all_held(self) -> str:
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(slots=True, eq=False)
class Response:
    """The answer of an open request so far, and what speculation did for it."""

    request_id: str
    checker: StopChecker
    decode_passes: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0

    def take(self, token_ids: Sequence[int]) -> StopCheck:
        """Add a pass's tokens to the answer. An error ends this request, never another."""
        try:
            return self.checker.take(token_ids)
        except Exception:
            log.exception(FAILED, self.request_id)
            return StopCheck(0, "error")

    def count_pass(self, num_drafted: int, num_verified: int, num_accepted: int, num_tokens: int) -> None:
        """Count one decode pass. num_accepted, num_tokens: without those behind a stop."""
        self.decode_passes += 1
        self.decoded_tokens += num_tokens
        self.drafted_tokens += num_drafted
        self.verified_tokens += num_verified
        self.accepted_tokens += num_accepted

    def figures(self, state: RequestState) -> Figures:
        """Return the counts that go with the last outcome."""
        return Figures(
            prompt_tokens=len(state.request.prompt_ids),
            completion_tokens=self.checker.num_tokens,
            cached_tokens=state.cached_len,
            decode_passes=self.decode_passes,
            decoded_tokens=self.decoded_tokens,
            drafted_tokens=self.drafted_tokens,
            verified_tokens=self.verified_tokens,
            accepted_tokens=self.accepted_tokens,
            seed=state.request.seed,
            preemptions=state.num_preemptions,
        )


class OutputQueue:
    """Open responses, their gains of the last step, and the outcomes for the clients.

    A gain becomes an outcome at the next `flush`, so that its text is made while a pass of the target runs. The
    first tokens of an answer and its end become one at once: clients wait for the first, and the end is the last.
    """

    def __init__(self, end_request: Callable[[str], RequestState]) -> None:
        """end_request: ends a request in the scheduler and returns its state."""
        self.responses: dict[str, Response] = {}  # of open requests, by request id
        self.gains: list[tuple[Response, Sequence[int], RowVerdict]] = []  # at most one for each response
        self.outcomes: list[Outcome] = []  # in the order in which clients should see them
        self._end_request = end_request

    def open(self, request: Request, eos_ids: frozenset[int], detokenizer: Detokenizer) -> None:
        """Begin the response to a request."""
        checker = StopChecker(request, eos_ids, detokenizer)
        self.responses[request.request_id] = Response(request.request_id, checker)

    def put(self, response: Response, token_ids: Sequence[int], verdict: RowVerdict) -> None:
        """Queue tokens that a response has taken. The first of an answer become an outcome at once."""
        if len(token_ids) < response.checker.num_tokens:
            self.gains.append((response, token_ids, verdict))
        else:
            self._emit(response, token_ids, verdict)

    def flush(self) -> None:
        """Make outcomes of all gains. A response whose text cannot be made ends here."""
        gains, self.gains = self.gains, []
        for response, token_ids, verdict in gains:
            self._emit(response, token_ids, verdict)

    def cancel(self, request_id: str) -> None:
        """End an open response with all its text; unknown ids are ignored."""
        if request_id in self.responses:
            self.flush()
        if response := self.responses.get(request_id):
            self.end(response, StopCheck(0, "cancelled"), response.checker.flush())

    def end(
        self,
        response: Response,
        check: StopCheck,
        text: str,
        token_ids: Sequence[int] = (),
        verdict: RowVerdict | None = None,
    ) -> None:
        """Close a response and its request, with a last outcome: tokens, why it ended, figures."""
        del self.responses[response.request_id]
        state = self._end_request(response.request_id)
        self.outcomes.append(
            Outcome(
                response.request_id,
                tuple(token_ids),
                text,
                logprobs=_logprobs(verdict, len(token_ids)) if verdict else None,
                finish_reason=check.finish_reason,
                stop_reason=check.stop_reason,
                figures=response.figures(state),
                error=INTERNAL if check.finish_reason == "error" else None,
            )
        )

    def take_outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def _emit(self, response: Response, token_ids: Sequence[int], verdict: RowVerdict) -> None:
        try:
            text = response.checker.text()
        except Exception:
            log.exception(FAILED, response.request_id)
            self.end(response, StopCheck(0, "error"), "")
            return
        logprobs = _logprobs(verdict, len(token_ids))
        self.outcomes.append(Outcome(response.request_id, tuple(token_ids), text, logprobs))


def _logprobs(verdict: RowVerdict, count: int) -> tuple[TokenLogprobs, ...] | None:
    """Return the log-probabilities of a row's first `count` tokens; None if its request asked for none."""
    return None if verdict.logprobs is None else tuple(verdict.logprobs[:count])
