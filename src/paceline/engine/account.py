"""What the engine keeps of an open request until its client has been told everything."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.nouns import Figures
from paceline.engine.writer import Writer, Written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engine.scheduler import Running

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Account:
    """What an open request has written and what speculation did for it. Its error never ends another's."""

    writer: Writer
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

    def figures(self, running: Running) -> Figures:
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

    def write(self, token_ids: Sequence[int]) -> Written:
        """Add a pass's tokens to the answer."""
        try:
            return self.writer.write(token_ids)
        except Exception:
            return self._failed()

    def spell(self, token_ids: Sequence[int]) -> Written:
        """Write tokens that were counted when their pass was over."""
        try:
            return Written(len(token_ids), self.writer.spell(token_ids))
        except Exception:
            return self._failed()

    def _failed(self) -> Written:
        log.exception("request %s failed", self.writer.request_id)
        return Written(0, "", "error")
