"""From what a user sends, text, token ids or a conversation, to requests the engine takes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.errors import PromptTooLong, RequestError
from paceline.core.nouns import Request
from paceline.core.params import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.params import SamplingParams, Speculation
    from paceline.model.template import ChatTemplate
    from paceline.model.tokenizer import Tokenizer

DRAWN_SEEDS = 1 << 53  # doubles hold every integer below this


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """What turns prompts into token ids for one model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    max_len: int  # tokens of prompt and answer of one request
    vocab_size: int | None = None  # rows of the model's embedding; None: token ids are not checked here

    def of_text(self, text: str) -> tuple[int, ...]:
        """Return a text's token ids. Raises `RequestError`, `PromptTooLong`."""
        self._check_length(self.tokenizer.min_num_tokens(text), "prompt", "at least ")
        return self._checked(self.tokenizer.encode(text), "prompt")

    def of_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return token ids that are a prompt already. Raises `RequestError`, `PromptTooLong`."""
        return self._checked(ids, "prompt")

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the token ids of a conversation; a content may be a text or parts of type text.

        Raises `RequestError`, `PromptTooLong`.
        """
        if self.template is None:
            raise RequestError("this model has no chat template; send a prompt to /v1/completions", "messages")
        if not messages:
            raise RequestError("messages must hold at least one message", "messages")
        text = self.template.render([_flat(message) for message in messages])
        self._check_length(self.tokenizer.min_num_tokens(text), "messages", "at least ")
        return self._checked(self.tokenizer.encode(text, add_special=False), "messages")

    def room(self, prompt_ids: Sequence[int]) -> int:
        """Return how many tokens an answer to this prompt may have."""
        return self.max_len - len(prompt_ids)

    def check_room(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Raise `PromptTooLong` if an answer of so many tokens does not fit behind a prompt."""
        if max_tokens > self.room(prompt_ids):
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens and max_tokens is {max_tokens}, together more than the "
                f"{self.max_len} this engine holds for one request; shorten either",
                "max_tokens",
            )

    def _checked(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        if not ids:
            raise RequestError("the prompt is empty, so there is nothing to continue", param)
        self._check_length(len(ids), param)
        size = self.vocab_size
        if size is not None and not all(0 <= token_id < size for token_id in ids):
            raise RequestError(f"the prompt has token ids outside the vocabulary of {size}", param)
        return tuple(ids)

    def _check_length(self, num_tokens: int, param: str, about: str = "") -> None:
        if num_tokens >= self.max_len:
            raise PromptTooLong(
                f"the prompt has {about}{num_tokens} tokens; prompt and answer together may have {self.max_len}",
                param,
            )


def part_text(kind: object, text: object) -> str:
    """Return the text of one part of a message's content. Raises `RequestError` for a part that is no text."""
    if kind != "text":
        raise RequestError(f"content of type {shown(kind)} is not supported; send text", "messages")
    if not isinstance(text, str):
        raise RequestError("a content part of type 'text' needs the field text", "messages")
    return text


def _flat(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as templates take it: its content one text, not a list of parts."""
    if not isinstance(message, Mapping):
        raise RequestError(f"a message must be a mapping, not {type(message).__name__}", "messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list | tuple) or not all(isinstance(part, Mapping) for part in content):
        raise RequestError("the content of a message must be a text or a list of text parts", "messages")
    return {**message, "content": "".join(part_text(part.get("type"), part.get("text")) for part in content)}


def seed_of(params: SamplingParams) -> int:
    """Return the seed a request asks for, or draw one that survives a client whose numbers are doubles."""
    return secrets.randbelow(DRAWN_SEEDS) if params.seed is None else params.seed


def requests_of(
    name: str,
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    seed: int,
    arrival_s: float,
    salt: str = "",
    speculation: Speculation | None = None,
) -> list[Request]:
    """Return one request for each of the n choices, alike but for the choice; ids are NAME-CHOICE."""
    return [
        Request(f"{name}-{choice}", prompt_ids, params, seed, choice, salt, arrival_s, speculation)
        for choice in range(params.n)
    ]
