"""What an open request has written, and what its client is told at the end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.nouns import Figures
from paceline.engine.writer import Taken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import RowVerdict, TokenLogprobs
    from paceline.engine.scheduler import RequestState
    from paceline.engine.writer import StopChecker

log = logging.getLogger(__name__)

FAILED = "request %s failed"


@dataclass(slots=True, eq=False)
class Response:
    """What an open request has written and what speculation did for it."""

    writer: StopChecker
    decode_passes: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0

    def count_pass(self, num_drafted: int, num_verified: int, num_accepted: int, num_tokens: int) -> None:
        """Add one decode pass; drafts and tokens after a stop are not counted as kept."""
        self.decode_passes += 1
        self.decoded_tokens += num_tokens
        self.drafted_tokens += num_drafted
        self.verified_tokens += num_verified
        self.accepted_tokens += num_accepted

    def figures(self, running: RequestState) -> Figures:
        """Return what the request's client is told at the end."""
        return Figures(
            prompt_tokens=len(running.request.prompt_ids),
            completion_tokens=self.writer.num_tokens,
            cached_tokens=running.cached_len,
            decode_passes=self.decode_passes,
            decoded_tokens=self.decoded_tokens,
            drafted_tokens=self.drafted_tokens,
            verified_tokens=self.verified_tokens,
            accepted_tokens=self.accepted_tokens,
            seed=running.request.seed,
            preemptions=running.num_preemptions,
        )


def take(account: Response, request_id: str, token_ids: Sequence[int]) -> Taken:
    """Add a row's tokens to its answer; one request's error never ends another's."""
    try:
        return account.writer.take(token_ids)
    except Exception:
        log.exception(FAILED, request_id)
        return Taken(0, "error")


def logprobs_of(verdict: RowVerdict, count: int) -> tuple[TokenLogprobs, ...] | None:
    """Return the log-probabilities of a row's first tokens, if its request asked."""
    return None if verdict.logprobs is None else tuple(verdict.logprobs[:count])
