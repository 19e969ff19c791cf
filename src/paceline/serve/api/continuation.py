"""Answers that go on behind tokens that a client has already.

A client may send the tokens that it has as `answer_ids`, from any server of the same promise key. The engine then
goes on behind them. A client of a stream that broke off may instead send the id of its last event, which is the
number of tokens so far, as `last-event-id`, with the same body and the seed. The answer is then written again, and
what the client has is not sent. Either way the response goes on as if nothing had happened.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from paceline.core.errors import RequestError
from paceline.core.params import check_token_ids, shown
from paceline.core.request_nouns import Outcome
from paceline.engine.answer_queue import take_told
from paceline.engine.output import checker_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Scope

    from paceline.core.request_nouns import Request
    from paceline.model.tokenizer import Tokenizer

    AnswerIds = Sequence[int | Sequence[int]]  # ids of the only answer, or a list for each answer

LAST_EVENT_ID, ACCEPT, EVENT_STREAM = b"last-event-id", b"accept", b"text/event-stream"
NOT_REPEATED = (
    "under this law another run may write another text, so last-event-id cannot go on with this stream; send the "
    "tokens so far as answer_ids"
)
_COUNTS = re.compile(r"[0-9]{1,7}(,[0-9]{1,7})*")


def told_answers(given: AnswerIds | None, num_answers: int) -> list[tuple[int, ...]]:
    """Return the tokens that a client has of each answer. Raises `RequestError`."""
    if not given:
        return [()] * num_answers
    if num_answers == 1 and all(isinstance(one, int) for one in given):
        return [tuple(one for one in given if isinstance(one, int))]
    lists = [tuple(one) for one in given if not isinstance(one, int)]
    if len(lists) != len(given) or len(lists) != num_answers:
        wanted = "a list of token ids" if num_answers == 1 else f"{num_answers} lists of token ids, one an answer"
        raise RequestError(f"answer_ids must be {wanted}", "answer_ids")
    return lists


def told_text(request: Request, tokenizer: Tokenizer, vocab_size: int | None) -> str:
    """Return the text of a request's told tokens. Raises `RequestError` if they end the answer."""
    check_told(request, tokenizer.vocab_size if vocab_size is None else vocab_size)
    return text_so_far(request, tokenizer, request.told)


def check_told(request: Request, vocab_size: int) -> None:
    """Raise `RequestError` for told tokens that no engine takes."""
    check_token_ids(request.prompt_ids, request.params, vocab_size, request.told)
    if len(request.told) > request.params.max_tokens:
        raise RequestError(
            f"answer_ids has {len(request.told)} tokens, and max_tokens, which counts the whole answer, is "
            f"{request.params.max_tokens}",
            "answer_ids",
        )


def check_scores(told: Sequence[Sequence[int]], *, scores: bool) -> None:
    """Raise `RequestError` if an answer that goes on asks for scores of its prompt."""
    if any(told) and scores:
        raise RequestError(
            "scores of a prompt come with the beginning of its answer; leave out prompt_logprobs, "
            "logprob_start_len, and logprobs with echo, or leave out answer_ids",
            "answer_ids",
        )


def event_ids_of(scope: Scope, requests: Sequence[Request], *, repeats: bool) -> tuple[bool, Sequence[int]]:
    """Return if events get ids, and how many tokens the client has of each answer.

    Without `last-event-id` there are no numbers. repeats: the answers can be written again as they were; if not,
    events get no ids. Raises `RequestError`.
    """
    headers = {name: bytes(value) for name, value in scope["headers"]}
    last = headers.get(LAST_EVENT_ID, b"").decode("latin-1").strip()
    if not last:
        return repeats and EVENT_STREAM in headers.get(ACCEPT, b""), ()
    if not repeats:
        raise RequestError(NOT_REPEATED)
    counts = [int(one) for one in last.split(",")] if _COUNTS.fullmatch(last) else []
    if len(counts) != len(requests):
        wanted = "a number of tokens" if len(requests) == 1 else f"{len(requests)} numbers of tokens"
        raise RequestError(f"last-event-id must be an id of this stream, {wanted}, not {shown(last)}")
    if any(request.params.seed is None and not request.params.greedy for request in requests):
        raise RequestError("last-event-id needs the seed, which every event of the stream tells", "seed")
    if any(count < len(request.told) for count, request in zip(counts, requests, strict=True)):
        raise RequestError("last-event-id counts the whole answer, answer_ids included", "answer_ids")
    return True, counts


class SentPart:
    """First tokens of an answer that its client has, though the engine writes them again."""

    def __init__(self, request: Request, tokenizer: Tokenizer, count: int, told: str) -> None:
        """count: number of tokens that the client has. told: text of the request's told tokens."""
        self._request, self._tokenizer, self._count = request, tokenizer, count
        self._ids, self._text = list(request.told), told

    def split(self, outcome: Outcome) -> tuple[Outcome | None, Outcome | None]:
        """Return the part of an outcome that the client has, and the part it lacks.

        The end of an answer is always sent again.
        """
        length, before = len(outcome.token_ids), len(self._ids)
        missing = self._count - before
        if missing <= 0 and outcome.finish_reason is None:
            return None, outcome
        self._ids += outcome.token_ids
        self._text += outcome.text
        if missing >= length:
            if outcome.finish_reason is None:
                return outcome, None
            return _first(outcome, length, len(outcome.text)), _rest(outcome, length, len(outcome.text))
        if missing <= 0:
            return None, outcome
        sent = text_so_far(self._request, self._tokenizer, self._ids[: self._count])
        cut = len(sent) - (len(self._text) - len(outcome.text))
        return _first(outcome, missing, cut), _rest(outcome, missing, cut)


def _first(outcome: Outcome, count: int, cut: int) -> Outcome:
    logprobs = None if outcome.logprobs is None else outcome.logprobs[:count]
    return Outcome(outcome.request_id, outcome.token_ids[:count], outcome.text[:cut], logprobs)


def _rest(outcome: Outcome, count: int, cut: int) -> Outcome:
    logprobs = None if outcome.logprobs is None else outcome.logprobs[count:]
    return replace(outcome, token_ids=outcome.token_ids[count:], text=outcome.text[cut:], logprobs=logprobs)


def text_so_far(request: Request, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text that a client has with an answer's first tokens."""
    return take_told(checker_of(request, tokenizer), token_ids)
