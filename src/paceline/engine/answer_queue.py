"""Open answers: how they begin and end, and what happens to them now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import RequestError
from paceline.core.figures import Figures
from paceline.core.request_nouns import Outcome
from paceline.core.weight_source import FIRST_VERSION
from paceline.engine.output import OutputQueue, Response, logprobs_of
from paceline.engine.stops import StopCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.nouns import RowVerdict
    from paceline.core.request_nouns import FinishReason, PromptScores, Request
    from paceline.engine.output import StopChecker
    from paceline.engine.request_state import RequestState

ENDED = "the answer so far has ended ({}), so there is nothing to continue; take it as it is"
INTERNAL = "internal error while writing the answer; the log has the details"


class AnswerQueue(OutputQueue):
    """The queue of outcomes, with the begin and the end of each answer."""

    def __init__(self, end_request: Callable[[str], object]) -> None:
        """end_request: ends a request in the scheduler."""
        super().__init__()
        self.changeable: dict[str, Response] = {}  # the `responses` with a change budget, by request id
        self.weight_version = FIRST_VERSION
        self.on_start: Callable[[Outcome], object] | None = None  # called for requests with `tells_start`
        self._end_request = end_request

    def open(self, state: RequestState, checker: StopChecker) -> None:
        """Begin the response to a request."""
        self.book.open(state.request)
        request_id = state.request.request_id
        self.responses[request_id] = response = Response(request_id, state, checker)
        _note_version(response, self.weight_version)
        if state.request.change_budget:
            self.changeable[request_id] = response
        if state.scores_prompt:
            response.prompt_logprobs = []

    def tell_start(self, request: Request) -> None:
        """Tell, if asked to, that a request enters a step, and by which weights.

        This comes before the step, as the step may end this process.
        """
        if request.tells_start and self.on_start is not None:
            start, version = self.responses[request.request_id].weights[-1]
            self.on_start(Outcome(request.request_id, (), "", start=start, version=version))

    def renew(self, version: str) -> None:
        """Note that newer weights write from here on."""
        self.weight_version = version
        for response in self.responses.values():
            _note_version(response, version)
            if response.prompt_logprobs is not None:  # newer weights score the whole prompt anew
                response.prompt_logprobs = []

    def score_prompt(self, request_id: str, scores: PromptScores) -> None:
        """Add those scores of a prompt that are not known yet.

        After a preemption the prompt is scored again, and known scores come a second time.
        """
        response = self.responses.get(request_id)
        if response is None or response.prompt_logprobs is None:  # the request has ended, or its answer has begun
            return
        known = response.prompt_logprobs
        known += scores.logprobs[len(known) + 1 - scores.first :]

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """End an open response with all its text; unknown ids are ignored."""
        if request_id in self.responses:
            self.flush()
        if response := self.responses.get(request_id):
            self.end(response, StopCheck(0, reason), response.checker.flush())

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
        self.changeable.pop(response.request_id, None)
        self.book.end(response.request_id)
        self._end_request(response.request_id)
        self.outcomes.append(
            Outcome(
                response.request_id,
                tuple(token_ids),
                text,
                logprobs=logprobs_of(verdict, len(token_ids)) if verdict else None,
                finish_reason=check.finish_reason,
                stop_reason=check.stop_reason,
                figures=_figures(response),
                error=INTERNAL if check.finish_reason == "error" else None,
                prompt_logprobs=response.take_prompt_logprobs(),
                start=response.checker.num_tokens - len(token_ids),
            )
        )


def take_told(checker: StopChecker, token_ids: Sequence[int]) -> str:
    """Take in an answer's first tokens, which its client has; return their text.

    Raises `RequestError` if they end the answer.
    """
    if reason := checker.take(token_ids).finish_reason:
        raise RequestError(ENDED.format(reason), "answer_ids")
    return checker.text()


def _note_version(response: Response, version: str) -> None:
    """Note the version of the weights that write from here on."""
    start = response.checker.num_tokens
    response.weights = [*(before for before in response.weights if before[0] < start), (start, version)]


def _figures(response: Response) -> Figures:
    """Return the counts that go with the last outcome."""
    state = response.state
    return Figures(
        prompt_tokens=len(state.request.prompt_ids),
        completion_tokens=response.checker.num_tokens,
        cached_tokens=state.cached_len,
        decode_passes=response.decode_passes,
        decoded_tokens=response.decoded_tokens,
        drafted_tokens=response.drafted_tokens,
        verified_tokens=response.verified_tokens,
        accepted_tokens=response.accepted_tokens,
        seed=state.request.seed,
        preemptions=state.num_preemptions,
        kept_by=tuple(response.kept_by.items()),
        weights=tuple(response.weights),
        change_budget=state.request.change_budget,
        changed_tokens=response.changed_tokens,
        changed_nats=response.changed_nats,
    )
