"""Responses and stream chunks in the form the `openai` client expects.

Beyond OpenAI: `seed` at the top, `usage.speculation`, `choices[].stop_reason`. Described in the server guide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan, nan
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from paceline.core.params import TYPICAL
from paceline.core.request_nouns import TokenLogprobs
from paceline.serve.api.message_parts import MessageParts
from paceline.serve.api.score_format import MIN_LOGPROB, token_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.figures import Figures
    from paceline.core.pass_notes import PassNote
    from paceline.core.request_nouns import Outcome, Request
    from paceline.model.detokenizer import Detokenizer
    from paceline.model.tokenizer import Tokenizer
    from paceline.serve.api.tool_calls.reader import ReaderPlan

to_json = msgspec.json.Encoder().encode
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseMeta:
    """Fields that every chunk of a response repeats."""

    response_id: str
    created: int  # unix time, seconds
    model: str
    seed: int
    fingerprint: str | None = None  # of the promise key

    def fields(self, kind: str) -> Json:
        """Return the fields at the top of a response or chunk."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "seed": self.seed,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True, eq=False)
class PartialAnswer:
    """Outcomes of one choice so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    last: Outcome | None = None  # the outcome that ended it; None: it is still open
    notes: list[PassNote] = field(default_factory=list)  # of its passes, if the request asked
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def add(self, outcome: Outcome) -> None:
        """Append what a step brought."""
        self.texts.append(outcome.text)
        self.token_ids += outcome.token_ids
        if outcome.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(outcome.logprobs)
        self.notes.extend(outcome.notes)
        if outcome.prompt_logprobs is not None:
            self.prompt_logprobs = outcome.prompt_logprobs
        if outcome.finish_reason is not None:
            self.last = outcome

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self.token_ids)

    @property
    def started(self) -> bool:
        """True once an outcome came."""
        return bool(self.texts)

    def ending(self) -> Json:
        """Return the finish and stop reason; nulls while the answer is open."""
        return {"finish_reason": None, "stop_reason": None} if self.last is None else _ending_of(self.last)


class RouteFormat(Protocol):
    """Form of one route's responses."""

    prefix: str  # of response ids
    kind: str
    chunk_kind: str

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""

    def choice(self, index: int, answer: PartialAnswer) -> Json:
        """Return a whole choice."""

    def delta(self, index: int, answer: PartialAnswer, outcome: Outcome) -> Json | None:
        """Return what an outcome adds to a choice; `answer` lacks it yet. None for nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatFormat:
    """POST /v1/chat/completions."""

    tokenizer: Tokenizer
    plan: ReaderPlan | None = None  # None: answers are plain text
    legacy: bool = False  # a call is a `function_call`
    as_ids: bool = False  # log-probabilities name tokens by their ids
    _readers: dict[int, MessageParts] = field(default_factory=dict, init=False)  # by choice, of a stream
    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, index: int, answer: PartialAnswer) -> Json:
        """Return a whole choice."""
        message, ending = {"role": "assistant", "content": answer.text, "refusal": None}, answer.ending()
        if self.plan is not None:
            parts = MessageParts(self.plan.reader(), self.legacy)
            message |= parts.message(answer.text, answer.token_ids)
            ending |= parts.ending(ending["finish_reason"])
        return {"index": index, "message": message, "logprobs": self._logprobs(answer.logprobs), **ending}

    def delta(self, index: int, answer: PartialAnswer, outcome: Outcome) -> Json | None:
        """Return what an outcome adds to a choice, None for nothing."""
        role = {} if answer.started else {"role": "assistant"}
        delta = role | ({"content": outcome.text} if outcome.text or role else {})
        logprobs, ending = self._logprobs(outcome.logprobs), _ending_of(outcome)
        if self.plan is not None:
            parts = self._parts(index, self.plan)
            delta = role | parts.delta(outcome)
            ending |= parts.ending(outcome.finish_reason)
            if not delta and logprobs is None and outcome.finish_reason is None:
                return None  # held back
        return {"index": index, "delta": delta, "logprobs": logprobs, **ending}

    def _parts(self, index: int, plan: ReaderPlan) -> MessageParts:
        if index not in self._readers:
            self._readers[index] = MessageParts(plan.reader(), self.legacy)
        return self._readers[index]

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        return {"content": [self._entry(entry) for entry in logprobs], "refusal": None}

    def _entry(self, entry: TokenLogprobs) -> Json:
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return self._token(entry.token_id, entry.logprob) | {"top_logprobs": [self._token(*p) for p in pairs]}

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": token_name(self.tokenizer, token_id, self.as_ids),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }


class _TextOffsets:
    """Offsets of an answer's tokens in its text, one token after the other.

    A token with part of a character has the offset of that character, which counts with the token that completes
    it. A special token, which the text leaves out, has no length.
    """

    def __init__(self, text: Detokenizer, told: Sequence[int]) -> None:
        """told: tokens of the answer before these."""
        self._text = text
        self._offset = len(text.push(told)) if told else 0  # characters

    def next(self, token_id: int) -> int:
        """Return the offset of the next token and advance behind it."""
        start = self._offset
        self._offset += len(self._text.push((token_id,)))
        return start


@dataclass(frozen=True, slots=True, eq=False)
class CompletionFormat:
    """POST /v1/completions."""

    tokenizer: Tokenizer
    requests: Sequence[Request]  # [num_answers]
    echoes: Sequence[str] = ()  # [num_prompts] text that begins the answers to each prompt; empty: no echo
    n: int = 1
    scored: Sequence[Sequence[int]] = ()  # [num_prompts] ids whose scores come first; empty: none
    as_ids: bool = False  # log-probabilities name tokens by their ids
    _offsets: dict[int, _TextOffsets] = field(default_factory=dict, init=False)  # by choice, of a stream
    prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def choice(self, index: int, answer: PartialAnswer) -> Json:
        """Return a whole choice."""
        text = self._echo(index) + answer.text
        prompt = self._scored_prompt(index, answer.prompt_logprobs)
        logprobs = self._logprobs(answer.logprobs, prompt, self._new_offsets(index))
        return {"index": index, "text": text, "logprobs": logprobs, **answer.ending()}

    def delta(self, index: int, answer: PartialAnswer, outcome: Outcome) -> Json:
        """Return what an outcome adds to a choice."""
        text = outcome.text if answer.started else self._echo(index) + outcome.text
        prompt = self._scored_prompt(index, outcome.prompt_logprobs)
        logprobs = self._logprobs(outcome.logprobs, prompt, self._stream_offsets(index))
        return {"index": index, "text": text, "logprobs": logprobs, **_ending_of(outcome)}

    def _scored_prompt(self, index: int, scored: Sequence[TokenLogprobs] | None) -> list[TokenLogprobs]:
        """Return the entries of an echoed prompt; the first token has no log-probability."""
        if not self.scored or scored is None:
            return []
        return [TokenLogprobs(self.scored[index // self.n][0], nan), *scored]

    def _stream_offsets(self, index: int) -> _TextOffsets:
        if index not in self._offsets:
            self._offsets[index] = self._new_offsets(index)
        return self._offsets[index]

    def _new_offsets(self, index: int) -> _TextOffsets:
        request = self.requests[index]  # with `scored` the text begins with the prompt's own
        text = self.tokenizer.detokenizer(within=request.within and not self.scored)
        return _TextOffsets(text, request.told)

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.n] if self.echoes else ""

    def _logprobs(
        self, answer: Sequence[TokenLogprobs] | None, prompt: Sequence[TokenLogprobs], offsets: _TextOffsets
    ) -> Json | None:
        if answer is None:
            return None
        entries = [*prompt, *answer]
        return {
            "tokens": [token_name(self.tokenizer, entry.token_id, self.as_ids) for entry in entries],
            "token_logprobs": [None if isnan(e.logprob) else max(e.logprob, MIN_LOGPROB) for e in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": [offsets.next(entry.token_id) for entry in entries],
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float] | None:
        """Return text -> log-probability of alternatives and chosen token; the likeliest of equal texts."""
        if isnan(entry.logprob):
            return None
        pairs = [(entry.token_id, entry.logprob), *zip(entry.top_ids, entry.top_logprobs, strict=True)]
        pairs.sort(key=lambda pair: pair[1])
        by_text = {token_name(self.tokenizer, i, self.as_ids): max(logprob, MIN_LOGPROB) for i, logprob in pairs}
        return dict(reversed(by_text.items()))


def _ending_of(outcome: Outcome) -> Json:
    return {"finish_reason": outcome.finish_reason, "stop_reason": outcome.stop_reason}


# Usage -----------------------------------------------------------------------------------------------


def token_usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return a usage with token counts alone, as it is before an answer ends."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def usage(figures: Sequence[Figures], n: int) -> Json:
    """Return the usage: each prompt counts once, whatever n; speculation sums over choices."""
    prompt_tokens = sum(f.prompt_tokens for f in figures[::n])
    completion_tokens = sum(f.completion_tokens for f in figures)
    passes = sum(f.decode_passes for f in figures)
    decoded = sum(f.decoded_tokens for f in figures)
    drafted = sum(f.drafted_tokens for f in figures)
    verified = sum(f.verified_tokens for f in figures)
    accepted = sum(f.accepted_tokens for f in figures)
    return token_usage(prompt_tokens, completion_tokens) | {
        "prompt_tokens_details": {"cached_tokens": sum(f.cached_tokens for f in figures[::n])},
        "legs": max((f.legs for f in figures), default=1),
        **({"resumed_inexact": True} if any(f.inexact for f in figures) else {}),
        "speculation": {
            "drafted_tokens": drafted,
            "trimmed_tokens": drafted - verified,
            "verified_tokens": verified,
            "accepted_tokens": accepted,
            "rejected_tokens": verified - accepted,
            "decode_passes": passes,
            "acceptance_length": round(decoded / passes, 4) if passes else 0.0,
            **changed_usage(figures),
        },
    }


def changed_usage(figures: Sequence[Figures]) -> Json:
    """Return the law, its budget and its changes; nothing under a lossless law."""
    budgets = [f.change_budget for f in figures if f.change_budget is not None]
    if not budgets:
        return {}
    return {
        "law": TYPICAL,
        "budget": max(budgets),
        "changed_tokens": sum(f.changed_tokens for f in figures),
        "changed_nats": round(sum(f.changed_nats for f in figures), 4),
    }
