"""What `LLM` and `AsyncLLM` return: answers, completions of a prompt, pieces of a stream."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.serve.api.message_parts import MessageParts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.nouns import Figures, FinishReason, Outcome, TokenLogprobs
    from paceline.serve.api.tool_calls.reader import ReaderPlan


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None  # one for each token, if asked for
    figures: Figures
    error: str | None = None  # with finish_reason "error"
    message: Mapping[str, Any] | None = None  # of a chat, as OpenAI has it: content, reasoning, calls of tools

    @property
    def tool_calls(self) -> tuple[Mapping[str, Any], ...]:
        """Calls of tools, each with `id` and `function`, which has `name` and `arguments` as JSON."""
        return tuple((self.message or {}).get("tool_calls", ()))


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
    def message(self) -> Mapping[str, Any] | None:
        """The first answer's message, of a chat."""
        return self.choices[0].message

    @property
    def tool_calls(self) -> tuple[Mapping[str, Any], ...]:
        """The first answer's calls of tools."""
        return self.choices[0].tool_calls

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
    """Outcomes of one answer so far."""

    plan: ReaderPlan | None = None  # how to read calls and reasoning; None: all is content
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
        text = "".join(o.text for o in self.outcomes)
        token_ids = tuple(itertools.chain.from_iterable(o.token_ids for o in self.outcomes))
        fields = {"content": text}
        if self.plan is not None:
            fields = MessageParts(self.plan.reader(), legacy=False).message(text, token_ids)
        return Answer(
            text=text,
            token_ids=token_ids,
            message={"role": "assistant"} | fields,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=tuple(itertools.chain.from_iterable(scored)) if scored else None,
            figures=last.figures,
            error=last.error,
        )
