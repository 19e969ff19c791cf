"""The prompts of a benchmark: a JSONL file with `question_id, category, turns[]`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError

MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. Only its first turn is asked."""

    question_id: str | int
    category: str
    text: str


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of a file, or `limit` of them evenly spaced over it. Raises `ConfigError`."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--prompts: there is no file {str(file)!r}")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"--prompts: {str(file)!r} is larger than {MAX_FILE_BYTES >> 20} MB")
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"--prompts: {str(file)!r} is not UTF-8") from None
    prompts = [_parse(line, f"{file.name}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts: {str(file)!r} holds no prompts")
    return spread(prompts, limit)


def spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """Return `limit` prompts evenly spaced over all, so that every task of a sorted file has its share."""
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _parse(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
        prompt = Prompt(value["question_id"], value.get("category", "all"), value["turns"][0])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise ConfigError(f"{where} is not a JSON object with question_id, category and turns[]") from None
    if not isinstance(prompt.text, str) or not isinstance(prompt.category, str):
        raise ConfigError(f"{where}: category and turns[0] must be strings")
    if not isinstance(prompt.question_id, str | int):
        raise ConfigError(f"{where}: question_id must be a string or an integer")
    return prompt
