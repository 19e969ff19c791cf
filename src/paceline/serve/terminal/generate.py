"""Answers to prompts from an argument, standard input or a file, as text or JSON lines."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.core.errors import ConfigError, PacelineError, RequestError
from paceline.serve.api.openai_format import to_json
from paceline.serve.terminal.banner import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.core.params import SamplingParams
    from paceline.serve.llm import LLM, Answer, Completion

MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to answer: a text to continue, or a conversation."""

    name: str | int
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    where: str = field(default="", compare=False)  # file and line

    def ids(self, llm: LLM, params: SamplingParams, *, chat: bool) -> tuple[int, ...]:
        """Return the prompt's token ids; with `chat` a text becomes a user's message.

        Raises `RequestError` that names the item, also if the answer has no room.
        """
        try:
            prompt_ids = self._ids(llm, chat)
            llm.prompts.check_room(prompt_ids, params.max_tokens)
        except RequestError as error:
            if not self.where:
                raise
            raise type(error)(f"{self.where}: {error}", error.param) from None
        return prompt_ids

    def _ids(self, llm: LLM, chat: bool) -> tuple[int, ...]:
        if self.prompt is not None and not chat:
            return llm.prompts.of_text(self.prompt)
        return llm.prompts.of_messages(self.messages or ({"role": "user", "content": self.prompt or ""},))


def read_items(path: Path) -> list[Item]:
    """Read a file of JSON lines with `prompt`, `messages` or `turns` (the first is used). Raises `ConfigError`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MB")
        lines = path.read_text(encoding="utf-8").split("\n")
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


def generate(
    llm: LLM, items: Sequence[Item], params: SamplingParams, *, chat: bool, as_json: bool, sink: TextIO
) -> int:
    """Answer every item and write the answers in the items' order. Returns 1 if some could not be answered."""
    if len(items) == 1 and not as_json and params.n == 1:
        return _stream_one(llm, items[0], params, chat, sink)
    with AnswersBar(len(items)) as bar:
        prompts = [item.ids(llm, params, chat=chat) for item in items]
        completions = llm.generate(prompts, params, lambda *_: bar.advance())
    for item, completion in zip(items, completions, strict=True):
        for piece in _json_lines(item, completion) if as_json else _texts(completion):
            sink.write(printable(piece, sink))
    return int(any(answer.error is not None for c in completions for answer in c.choices))


def _stream_one(llm: LLM, item: Item, params: SamplingParams, chat: bool, sink: TextIO) -> int:
    error = None
    for delta in llm.stream(item.ids(llm, params, chat=chat), params):
        sink.write(printable(delta.text, sink))
        sink.flush()
        error = delta.outcome.error
    sink.write("\n")
    if error is not None:
        raise PacelineError(error)
    return 0


def _texts(completion: Completion) -> Iterator[str]:
    for answer in completion.choices:
        yield answer.text + "\n"


def _json_lines(item: Item, completion: Completion) -> Iterator[str]:
    for index, answer in enumerate(completion.choices):
        yield to_json(_row(item, index, answer)).decode() + "\n"


def _row(item: Item, index: int, answer: Answer) -> dict[str, Any]:
    figures = asdict(answer.figures) | {"acceptance_length": answer.figures.acceptance_length}
    return {
        "id": item.name,
        "choice": index,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "token_ids": answer.token_ids,
        "figures": figures,
    } | ({} if answer.error is None else {"error": answer.error})


class AnswersBar:
    """How many answers are finished; shown on a terminal only."""

    def __init__(self, total: int, done: int = 0) -> None:
        columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(file=sys.stderr)
        self._bar = Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("answers", total=total, completed=done)

    def __enter__(self) -> AnswersBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """Count one."""
        self._bar.advance(self._task)
