"""What a request has written so far: stops, text, and what is safe to stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.core.nouns import BROKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import FinishReason, Request
    from paceline.model.detokenizer import Detokenizer


class Taken(NamedTuple):
    """What became of a pass's tokens."""

    num_tokens: int  # kept of those offered, the one that completed a stop included
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class StopChecker:
    """Takes a request's tokens one by one, as if they had never come in drafts, and stops where it must.

    What they say may be asked for later, when there is time.
    """

    def __init__(self, request: Request, eos_ids: frozenset[int], detokenizer: Detokenizer) -> None:
        params = request.params
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._ends = self._eos_ids | self._stop_ids | {BROKEN}  # what may end the answer by itself
        self._detokenizer = detokenizer
        self._num_tokens = 0
        self._unread: Sequence[int] = ()  # tokens that end nothing, whatever they say
        self._text = ""  # read, and not told yet
        self._held = ""  # text that may turn out to begin a stop string

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._num_tokens

    def take(self, token_ids: Sequence[int]) -> Taken:
        """Add tokens until one of them ends the answer; tokens after it are dropped."""
        after = self._num_tokens + len(token_ids)
        if self._params.stop or after >= self._params.max_tokens or not self._ends.isdisjoint(token_ids):
            return self.take_slow(token_ids)
        self._unread = [*self._unread, *token_ids] if self._unread else token_ids
        self._num_tokens = after  # none of them ends it, as nearly always
        return Taken(len(token_ids))

    def take_slow(self, token_ids: Sequence[int]) -> Taken:
        """Do what `take` does, looking at every token."""
        if self._unread:
            self._read()
        for count, token_id in enumerate(token_ids, 1):
            if token_id == BROKEN:
                self._text += self._rest()
                return Taken(count - 1, "error")
            self._num_tokens += 1
            piece, finish_reason, stop_reason = self._add(token_id)
            self._text += piece
            if finish_reason is not None:
                return Taken(count, finish_reason, stop_reason)
        return Taken(len(token_ids))

    def text(self) -> str:
        """Return the text since the last call that no later token can take back."""
        if self._unread:
            self._read()
        text, self._text = self._text, ""
        return text

    def flush(self) -> str:
        """Return that and the text that was held back, when nothing more will come."""
        return self.text() + self._rest()

    def _read(self) -> None:
        unread, self._unread = self._unread, ()
        self._num_tokens -= len(unread)  # what cannot be read is not written
        self._text += self._detokenizer.push(unread)
        self._num_tokens += len(unread)

    def _add(self, token_id: int) -> tuple[str, FinishReason | None, str | int | None]:
        may_stop = self._num_tokens >= self._params.min_tokens
        if may_stop and token_id in self._eos_ids:
            return self._rest(), "stop", None
        if may_stop and token_id in self._stop_ids:
            shown = self._detokenizer.push((token_id,)) if self._params.include_stop else ""
            self._held += shown
            return self._rest(), "stop", token_id
        self._held += self._detokenizer.push((token_id,))
        if self._params.stop and (found := self._find_stop(may_stop)) is not None:
            return found[0], "stop", found[1]
        if self._num_tokens >= self._params.max_tokens:
            return self._rest(), "length", None
        return self._release(), None, None

    def _find_stop(self, may_stop: bool) -> tuple[str, str] | None:
        """Return the text up to the first stop string, and that string; None if there is none yet."""
        found = [(at, stop) for stop in self._params.stop if (at := self._held.find(stop)) >= 0]
        if not found or not may_stop:
            return None
        at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
        return self._held[: at + len(stop) if self._params.include_stop else at], stop

    def _release(self) -> str:
        """Return the text that cannot be part of a stop string any more."""
        keep = max((_overlap(self._held, stop) for stop in self._params.stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _rest(self) -> str:
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`, all of it excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
