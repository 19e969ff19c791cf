"""Nouns of a request, from its arrival to its last outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from paceline.core.figures import Figures, Spent  # at run time: messages are decoded by these types
from paceline.core.pass_notes import PassNote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.params import SamplingParams, Speculation

FinishReason = Literal["stop", "length", "cancelled", "error", "abort"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request for one text; n choices become n requests that differ in `choice` only.

    An answer may have begun elsewhere: its first tokens, `told`, are known, and it goes on behind them.
    """

    request_id: str
    prompt_ids: tuple[int, ...]  # [prompt_len]
    params: SamplingParams
    seed: int  # 0 <= seed < 2**63
    choice: int = 0
    salt: str = ""  # requests of different salts share no cached pages
    speculation: Speculation | None = None  # None: the engine's own
    told: tuple[int, ...] = ()  # the answer's first tokens, which its client has already
    tells_start: bool = False  # an outcome without tokens comes before the request's first step
    whole: bool = False  # nobody reads the answer before its end, so outcomes may be told together
    within: bool = False  # the answer continues a text, so a space at its start is part of it

    def check(self) -> None:
        """Assert what every package may rely on."""
        assert self.prompt_ids, "an empty prompt has no last token to continue"
        assert 0 <= self.seed < 1 << 63
        assert 0 <= self.choice < self.params.n

    @property
    def scores_prompt(self) -> bool:
        """True if its prompt's tokens get log-probabilities, which come with an answer's first tokens."""
        return self.params.prompt_logprobs is not None and not self.told

    @property
    def keeps_text(self) -> bool:
        """False if it asks for a law that changes texts."""
        return self.speculation is None or self.speculation.keeps_text

    @property
    def change_budget(self) -> float | None:
        """Largest share of changed tokens; None under a lossless law. Settled by the engine."""
        return None if self.speculation is None else self.speculation.budget


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A request that gets a row, for the first time or again after a preemption."""

    row: int
    request: Request
    token_ids: Sequence[int]  # [length] prompt, and the answer written before a preemption
    cached_len: int  # leading tokens whose target KV is already there
    pages: tuple[int, ...]  # of the cached tokens
    rebirth: bool = False  # True if it goes on after a preemption


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the raw distribution at one emitted token."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()  # most likely first
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Log-probabilities of prompt tokens that a chunk of prefill has scored."""

    first: int  # place of the first of these tokens in its row
    logprobs: Sequence[TokenLogprobs]


class Outcome(Struct, frozen=True, eq=False, gc=False, array_like=True):
    """Gain of one request in a step, after stops: what is streamed to its client.

    A struct takes a third of a noun's time to make. Its message is an array, without names.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token, if asked for
    finish_reason: FinishReason | None = None  # None while it runs
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    figures: Figures | None = None  # with the last outcome
    error: str | None = None  # with finish_reason "error"
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = (
        None  # [prompt_len - 1], with the first outcome if asked for
    )
    notes: tuple[PassNote, ...] = ()  # of the passes that made these tokens, if the request asked
    start: int = 0  # answer tokens before these, those told with the request included
    spent: Spent | None = None  # None: see `Spent.after`
    version: str | None = None  # of the weights that write from `start` on; in the outcome of `tells_start` only
