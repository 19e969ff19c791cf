"""User input (texts, token ids, conversations, files of them) to engine requests."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paceline.core.errors import ConfigError, PromptTooLong, RequestError
from paceline.core.params import shown
from paceline.core.request_nouns import Request
from paceline.serve.control_text import GuardedValues
from paceline.serve.conversation import Conversation
from paceline.serve.template_values import template_values, written_out

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.core.params import SamplingParams, Speculation
    from paceline.core.sampling_defaults import Defaults
    from paceline.model.template_source import TemplateSource
    from paceline.model.tokenizer import Tokenizer
    from paceline.serve.api.tool_calls.plan import AnswerForms
    from paceline.serve.api.tool_calls.reader import ReaderPlan
    from paceline.serve.control_text import ControlGuard
    from paceline.serve.conversation import ToolUse

MAX_DRAWN_SEED = 1 << 53  # exclusive; clients whose numbers are doubles keep every integer below it
_END_MARK = "\ue400"  # private use, and none of the marks of `control_text`
MAX_CHAR_BYTES = 4  # in UTF-8
MAX_FILE_BYTES = 1 << 30  # of a file of prompts


class Renderer(Protocol):
    """Chat template, rendered in this process or in another."""

    source: TemplateSource

    def render_all(self, asked: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the prompt of each mapping of variables. Raises `RequestError`."""


class TokenPrompt(NamedTuple):
    """Prompt as token ids."""

    ids: tuple[int, ...]
    opened: bool = False  # it ends inside reasoning
    continues: bool = False  # it ends inside a text that the answer continues; False: the answer begins one


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Conversion of prompts to token ids for one model."""

    tokenizer: Tokenizer
    template: Renderer | None
    max_len: int  # tokens of prompt and answer of one request
    vocab_size: int | None = None  # rows of the model's embedding; None: token ids are not checked here
    forms: AnswerForms | None = None  # of calls and reasoning; None: there are none
    guard: ControlGuard | None = None  # None: users' text may become control tokens
    sampling: Defaults = field(default_factory=dict)  # of requests that set none

    def of_text(self, text: str) -> tuple[int, ...]:
        """Return a text's token ids. Raises `RequestError`, `PromptTooLong`."""
        self._check_text(text, "prompt")
        return self._checked(self.tokenizer.encode(text), "prompt")

    def of_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return a prompt of token ids after checking it. Raises `RequestError`, `PromptTooLong`."""
        return self._checked(ids, "prompt")

    def to_continue(self, ids: tuple[int, ...]) -> TokenPrompt:
        """Return a prompt whose text its answers continue; special tokens alone are no text."""
        return TokenPrompt(ids, continues=not all(map(self.tokenizer.is_special, ids)))

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return token ids; a content is text or text parts. Raises `RequestError`, `PromptTooLong`."""
        return self.of_conversation(Conversation([with_text_content(message) for message in messages])).ids

    def of_conversation(self, conversation: Conversation) -> TokenPrompt:
        """Return the prompt of a conversation. Raises `RequestError`, `PromptTooLong`."""
        if self.template is None:
            raise RequestError("this model has no chat template; send a prompt to /v1/completions", "messages")
        family = None if self.forms is None else self.forms.family
        values = template_values(_with_end_marked(conversation) if conversation.continue_final else conversation)
        guarded = GuardedValues((values,)) if self.guard is None else self.guard.guarded(values)
        source = self.template.source.text
        asked = [written_out(values, source, family) for values in guarded.asked]
        texts = self.template.render_all(asked)
        text, which = (texts[0], 0) if self.guard is None else self.guard.chosen(guarded, texts)
        if conversation.continue_final:
            text = _up_to_end(text)
        ids = self._encoded(text, guarded.mark if which == 0 else "")
        opened = self._opened(conversation, text)
        return TokenPrompt(ids, opened, conversation.continue_final)

    def _encoded(self, text: str, mark: str) -> tuple[int, ...]:
        """Return the ids of a rendered text; the pieces between marks are tokenised by themselves."""
        self._check_text(text, "messages")
        first, *others = text.split(mark) if mark else [text]
        ids = self.tokenizer.encode(first, add_special=False)
        for piece in others:
            ids += self.tokenizer.encode_within(piece)
        return self._checked(ids, "messages")

    def _opened(self, conversation: Conversation, text: str) -> bool:
        """Return True if a rendered prompt ends inside reasoning."""
        marks = None if self.forms is None else self.forms.marks
        if marks is None:
            return False
        if conversation.continue_final:
            final = str(conversation.messages[-1]["content"])
            return marks.open in final and marks.close not in final.rpartition(marks.open)[2]
        return conversation.add_generation_prompt and text.rstrip().endswith(marks.open)

    def formed(self, params: SamplingParams, use: ToolUse | None, opened: bool) -> SamplingParams:
        """Return parameters with the grammar of an answer with calls or reasoning."""
        if self.forms is None or (params.grammar is None and use is None):
            return params
        return replace(params, grammar=self.forms.grammar(use, params.grammar, opened))

    def reader_plan(self, use: ToolUse | None, prompt: TokenPrompt) -> ReaderPlan | None:
        """Return how to read an answer; None if it is plain text."""
        return None if self.forms is None else self.forms.reader_plan(use, prompt.opened, prompt.continues)

    def room(self, prompt_ids: Sequence[int]) -> int:
        """Return the largest number of tokens that an answer to this prompt may have."""
        return self.max_len - len(prompt_ids)

    def check_room(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Raise `PromptTooLong` if an answer of `max_tokens` does not fit behind a prompt."""
        if max_tokens > self.room(prompt_ids):
            raise PromptTooLong.of(len(prompt_ids), max_tokens, self.max_len)

    def _checked(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        if not ids:
            raise RequestError("the prompt is empty, so there is nothing to continue", param)
        self._check_length(len(ids), param)
        size = self.vocab_size
        if size is not None and not all(0 <= token_id < size for token_id in ids):
            raise RequestError(f"the prompt has token ids outside the vocabulary of {size}", param)
        return tuple(ids)

    def _check_text(self, text: str, param: str) -> None:
        """Raise `PromptTooLong` for a text that cannot fit, before it is tokenised."""
        if len(text) * MAX_CHAR_BYTES >= self.max_len:  # short texts always fit, as a token has a byte
            self._check_length(self.tokenizer.min_num_tokens(text), param, "at least ")

    def _check_length(self, num_tokens: int, param: str, about: str = "") -> None:
        if num_tokens >= self.max_len:
            raise PromptTooLong(
                f"the prompt has {about}{num_tokens} tokens; prompt and answer together may have {self.max_len}",
                param,
            )


def _with_end_marked(conversation: Conversation) -> Conversation:
    """Return a conversation with a mark behind its last message's text.

    The mark finds the end: the text may also stand elsewhere in the prompt, or run into the template's text.
    """
    *before, last = conversation.messages
    return replace(conversation, messages=[*before, {**last, "content": f"{last['content']}{_END_MARK}"}])


def _up_to_end(text: str) -> str:
    """Return a rendered prompt up to the mark. Raises `RequestError`."""
    before, found, _ = text.rpartition(_END_MARK)
    if not found:
        raise RequestError(
            "the chat template changes the last message, so it cannot be continued", "continue_final_message"
        )
    return before


def part_text(kind: object, text: object) -> str:
    """Return the text of one part of a message's content. Raises `RequestError` for other kinds."""
    if kind != "text":
        raise RequestError(f"content of type {shown(kind)} is not supported; send text", "messages")
    if not isinstance(text, str):
        raise RequestError("a content part of type 'text' needs the field text", "messages")
    return text


def with_text_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is one text instead of a list of parts."""
    if not isinstance(message, Mapping):
        raise RequestError(f"a message must be a mapping, not {type(message).__name__}", "messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list | tuple) or not all(isinstance(part, Mapping) for part in content):
        raise RequestError("the content of a message must be a text or a list of text parts", "messages")
    return {**message, "content": "".join(part_text(part.get("type"), part.get("text")) for part in content)}


# Requests --------------------------------------------------------------------------------------------


def seed_of(params: SamplingParams) -> int:
    """Return the seed a request asks for, or draw one below 2**53."""
    return secrets.randbelow(MAX_DRAWN_SEED) if params.seed is None else params.seed


def requests_of(
    name: str,
    prompt: TokenPrompt,
    params: SamplingParams,
    seed: int,
    salt: str = "",
    speculation: Speculation | None = None,
) -> list[Request]:
    """Return one request for each of the n choices, with ids NAME-CHOICE."""
    return [
        Request(f"{name}-{choice}", prompt.ids, params, seed, choice, salt, speculation, within=prompt.continues)
        for choice in range(params.n)
    ]


# Files of prompts ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a file of prompts: a text to continue, or a conversation."""

    name: str | int
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    where: str = field(default="", compare=False)  # file and line, for error messages

    def asked(self, prompts: Prompts, params: SamplingParams, *, chat: bool) -> TokenPrompt:
        """Return the prompt; with `chat` a text becomes a user's message.

        Raises `RequestError` that names the item, also if the answer has no room.
        """
        try:
            prompt = self._asked(prompts, chat)
            prompts.check_room(prompt.ids, params.max_tokens)
        except RequestError as error:
            if not self.where:
                raise
            raise type(error)(f"{self.where}: {error}", error.param) from None
        return prompt

    def _asked(self, prompts: Prompts, chat: bool) -> TokenPrompt:
        if self.prompt is not None and not chat:
            return prompts.to_continue(prompts.of_text(self.prompt))
        messages = self.messages or ({"role": "user", "content": self.prompt or ""},)
        return TokenPrompt(prompts.of_messages(messages))


def read_items(path: Path) -> list[Item]:
    """Read JSON lines with `prompt`, `messages` or `turns` (the first is used). Raises `ConfigError`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MB")
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold other line separators as they are
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    items = [_item(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ConfigError(f"{path} holds no prompts")
    return items


def _item(line: str, number: int, path: Path) -> Item:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not valid JSON") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be a JSON object")
    given = row.get("question_id", row.get("id"))
    name = given if isinstance(given, str | int) else number
    if isinstance(row.get("prompt"), str):
        return Item(name, row["prompt"], where=where)
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return Item(name, messages=({"role": "user", "content": turns[0]},), where=where)
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return Item(name, messages=tuple(messages), where=where)
    raise ConfigError(f"{where} needs a prompt, messages or turns")
