"""Results of `LLM` and `AsyncLLM`: answers, completions, pieces of a stream."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.figures import Figures
    from paceline.core.request_nouns import FinishReason, Outcome, TokenLogprobs
    from paceline.serve.api.tool_calls.events import ParsedAnswer


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None  # one for each new token, if asked for
    figures: Figures
    error: str | None = None  # with finish_reason "error"
    message: ParsedAnswer | None = None  # of a chat: reasoning, content and calls of tools


@dataclass(frozen=True, slots=True)
class Completion:
    """The n answers to one prompt. The first one's fields are properties."""

    prompt_ids: tuple[int, ...]
    choices: tuple[Answer, ...]  # [n]

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.choices[0].text

    @property
    def message(self) -> ParsedAnswer | None:
        """The first answer's reasoning, content and calls of tools, if this is a chat."""
        return self.choices[0].message

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first answer's token ids."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Reason why the first answer ended."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token id that ended the first answer."""
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The first answer's log-probabilities."""
        return self.choices[0].logprobs

    @property
    def figures(self) -> Figures:
        """Cost of the first answer and effect of speculation on it."""
        return self.choices[0].figures

    @property
    def seed(self) -> int:
        """The seed of all answers."""
        return self.figures.seed


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens and text that one step added to one answer of a stream."""

    choice: int
    outcome: Outcome

    @property
    def text(self) -> str:
        """The text added."""
        return self.outcome.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens added."""
        return self.outcome.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the answer ended; None while it is open."""
        return self.outcome.finish_reason

    @property
    def figures(self) -> Figures | None:
        """Cost of the answer; in its last delta only."""
        return self.outcome.figures


@dataclass(slots=True, eq=False)
class OpenAnswer:
    """One answer so far: what was told with its request, and outcomes behind it."""

    told: tuple[int, ...] = ()
    told_text: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """True once the answer has ended."""
        return bool(self.outcomes) and self.outcomes[-1].finish_reason is not None

    def answer(self) -> Answer:
        """Return the finished answer."""
        last = self.outcomes[-1]
        assert last.finish_reason is not None
        assert last.figures is not None
        scored = [o.logprobs for o in self.outcomes if o.logprobs is not None]
        return Answer(
            text="".join([self.told_text, *(o.text for o in self.outcomes)]),
            token_ids=tuple(itertools.chain(self.told, *(o.token_ids for o in self.outcomes))),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=tuple(itertools.chain.from_iterable(scored)) if scored else None,
            figures=last.figures,
            error=last.error,
        )
