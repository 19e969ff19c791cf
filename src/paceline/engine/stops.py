"""Stops, token by token: an answer's end, and its text that is safe to stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.core.nouns import BROKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.request_nouns import FinishReason, Request
    from paceline.model.detokenizer import Detokenizer


class StopCheck(NamedTuple):
    """Result of checking the tokens of one pass for stops."""

    num_tokens: int  # kept tokens, with the one that completed a stop
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id


class TokenwiseChecker:
    """Takes a request's tokens one by one and stops at the first that ends it."""

    __slots__ = (
        "_detokenizer",
        "_ending_ids",
        "_eos_ids",
        "_held",
        "_params",
        "_stop_ids",
        "_text",
        "most_tokens",
        "num_tokens",
    )

    def __init__(self, request: Request, eos_ids: frozenset[int], detokenizer: Detokenizer) -> None:
        params = request.params
        self.num_tokens = 0  # tokens written so far
        self.most_tokens = (
            0 if params.stop else params.max_tokens
        )  # an answer of fewer tokens goes on, and its text need not be read
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._ending_ids = self._eos_ids | self._stop_ids | {BROKEN}
        self._detokenizer = detokenizer
        self._text = ""  # text that was read and is not handed out yet
        self._held = ""  # text that may turn out to begin a stop string

    def take_each(self, token_ids: Sequence[int]) -> StopCheck:
        """Add tokens one by one: each may end the answer. Earlier tokens have been read."""
        if token_ids and not self._params.max_tokens:
            return StopCheck(0, "length")
        for count, token_id in enumerate(token_ids, 1):
            if token_id == BROKEN:
                self._text += self._all_held()
                return StopCheck(count - 1, "error")
            self.num_tokens += 1
            piece, finish_reason, stop_reason = self._add(token_id)
            self._text += piece
            if finish_reason is not None:
                return StopCheck(count, finish_reason, stop_reason)
        return StopCheck(len(token_ids))

    def _add(self, token_id: int) -> tuple[str, FinishReason | None, str | int | None]:
        """Add one token; return text that is safe to stream, finish reason and stop reason."""
        may_stop = self.num_tokens >= self._params.min_tokens
        if token_id in self._eos_ids and (may_stop or self._params.grammar):  # a grammar wins over min_tokens
            return self._all_held(), "stop", None
        if may_stop and token_id in self._stop_ids:
            self._held += self._detokenizer.push((token_id,)) if self._params.include_stop else ""
            return self._all_held(), "stop", token_id
        self._held += self._detokenizer.push((token_id,))
        if self._params.stop and (found := self._find_stop(may_stop)) is not None:
            return found[0], "stop", found[1]
        if self.num_tokens >= self._params.max_tokens:
            return self._all_held(), "length", None
        return self._release(), None, None

    def _find_stop(self, may_stop: bool) -> tuple[str, str] | None:
        """Return the text up to the first stop string, and that string, or None."""
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
    """Return the length of `text`'s longest suffix that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
