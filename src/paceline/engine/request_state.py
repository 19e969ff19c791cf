"""State of a request in the scheduler: tokens, pages, and passes in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.prefix_cache import chain_hash

if TYPE_CHECKING:
    from paceline.core.request_nouns import Request

SCORED_COST = 4  # a prompt token that gets log-probabilities costs as much prefill as this many others
DEEP_TOKENS = 8192  # per this much context a prompt token costs one token more, beside rows that decode


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one request, from arrival to end."""

    request: Request
    order: int  # arrival order, kept through preemption
    hashes: list[bytes]  # the root, then one for each full page of token_ids hashed so far
    token_ids: list[int]  # [known_len] prompt and revealed answer
    answer_end: int  # tokens of the longest answer, with its prompt
    row: int = -1  # -1 while it waits
    num_drafts: int = 0  # drafts planned for its last pass
    group: int = 0  # its row group under overlap
    pages: list[int] = field(default_factory=list)
    num_past: int = 0  # leading entries of `pages` behind its window: they, or their window parts, are given back
    num_bare: int = 0  # last entries of `pages` that lack their window part
    num_sent_pages: int = 0  # leading pages that the backend knows
    decoding: bool = False  # True once its last prefill chunk has been scheduled
    scheduled_len: int = 0  # known tokens whose target KV is there or being computed
    computed_len: int = 0  # known tokens whose target KV is there
    in_flight: int = 0  # number of passes whose outcome is not known yet
    waits: bool = False  # it decodes again only once the outcome of its last pass is known
    in_flight_tokens: int = 0  # upper bound of the tokens these passes add
    cached_len: int = 0  # prompt tokens found in the prefix cache at its first admission
    num_preemptions: int = 0
    was_read: bool = False  # True if its pages on disk have been read since it began to wait
    ended: bool = False  # finished or cancelled; its row is kept while a pass is in flight

    @property
    def scores_prompt(self) -> bool:
        """True if its prompt's tokens get log-probabilities."""
        return self.request.scores_prompt

    @property
    def asks(self) -> bool:
        """True if the request states how it is speculated."""
        asked = self.request.speculation
        return asked is not None and asked.steers

    def token_cost(self, *, beside: bool) -> int:
        """Return how many prefill tokens one token counts for; a scored token has logits, too.

        beside: True if rows decode in the same pass. Attention to a long context takes longer than all else, so
        chunks shrink as the context grows: the rows then wait about equally long for each chunk.
        """
        deep = 1 + self.scheduled_len // DEEP_TOKENS if beside else 1
        return deep * (SCORED_COST if self.scores_prompt else 1)

    @property
    def num_whole(self) -> int:
        """Number of leading entries of `pages` that its passes may write."""
        return len(self.pages) - self.num_bare

    @property
    def upper_len(self) -> int:
        """Upper bound of the length once the passes in flight are committed."""
        return len(self.token_ids) + self.in_flight_tokens

    @property
    def remaining(self) -> int:
        """Answer tokens it may still gain after the passes in flight, one from each."""
        return self.answer_end - len(self.token_ids) - min(self.in_flight, self.in_flight_tokens)

    def page_hashes(self, num_pages: int) -> list[bytes]:
        """Return the hashes of the first `num_pages` pages, which must be full of known tokens."""
        for index in range(len(self.hashes) - 1, num_pages):
            tokens = self.token_ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            self.hashes.append(chain_hash(self.hashes[-1], tokens))
        return self.hashes[1 : num_pages + 1]
