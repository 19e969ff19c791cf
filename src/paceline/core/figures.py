"""Counts of one request: its cost, and what speculation did for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Spent(NamedTuple):
    """Counts of a request on one engine so far, as in `Figures`.

    An engine sends them with an outcome if plain decoding alone does not explain them.
    """

    cached_tokens: int = 0
    decode_passes: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    changed_tokens: int = 0
    changed_nats: float = 0.0

    def after(self, told: Spent | None, num_tokens: int) -> Spent:
        """Return the counts after an outcome: those sent with it, else plain decoding's.

        num_tokens: tokens of decode passes, one each; an engine's first token comes from the prefill instead.
        """
        if told is not None:
            return told
        passes, decoded = self.decode_passes + num_tokens, self.decoded_tokens + num_tokens
        return self._replace(decode_passes=passes, decoded_tokens=decoded)


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of one request, sent with its last outcome: its cost and speculation's effect."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    decode_passes: int
    decoded_tokens: int  # committed by decode passes, so without the prefill's token
    drafted_tokens: int
    verified_tokens: int  # drafts after trimming
    accepted_tokens: int
    seed: int
    preemptions: int = 0
    kept_by: tuple[tuple[str, int], ...] = ()  # (drafter, its accepted tokens)
    legs: int = 1  # replicas of a fleet that wrote a part of the answer
    inexact: bool = False  # these replicas had different promise keys
    weights: tuple[tuple[int, str], ...] = ()  # (first answer token, version of the weights that wrote from there)
    change_budget: float | None = None  # of the law `typical`; None: the law was lossless
    changed_tokens: int = 0  # tokens that are not the target's own choices
    changed_nats: float = 0.0  # summed over these: log of (the likeliest token's probability / the token's own)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per decode pass, the target's own included, the prefill's token not."""
        return self.decoded_tokens / self.decode_passes if self.decode_passes else 0.0

    def behind(self, earlier: Spent) -> Figures:
        """Return the counts of an answer that another engine began.

        earlier: counts of that engine; how much of the prompt was cached is its count alone.
        """
        sums = {name: getattr(self, name) + count for name, count in earlier._asdict().items()}
        return replace(self, **sums | {"cached_tokens": earlier.cached_tokens})
