"""The prompts of a benchmark: built-in ones, or a JSONL file with `question_id, category, turns[]`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

BUILTIN = "builtin"  # --prompts value that names the prompts shipped with Paceline
BUILTIN_FILE = Path(__file__).with_name("builtin_prompts.jsonl")
PROMPTS_METAVAR = f"{BUILTIN}|FILE.jsonl"
PROMPTS_HELP = f"prompts: {BUILTIN}, or a file of lines with question_id, category, turns[]"
MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. Only the first of its turns is asked."""

    question_id: str | int
    category: str
    text: str


def read_prompts(name: str | Path, limit: int | None = None) -> list[Prompt]:
    """Return `limit` evenly spaced prompts of a file, or built-in ones. Raises `ConfigError`."""
    file = BUILTIN_FILE if name == BUILTIN else Path(name)
    if not file.is_file():
        raise ConfigError(
            f"--prompts: there is no file {str(file)!r}; leave --prompts out for the built-in prompts, or get "
            "those of Spec-Bench, data/spec_bench/question.jsonl in the project hemingkx/Spec-Bench on GitHub"
        )
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


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """Return `limit` evenly spaced prompts, so each category of a sorted file has its share."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _parse(line: str, place: str) -> Prompt:
    try:
        value = json.loads(line)
        prompt = Prompt(value["question_id"], value.get("category", "all"), value["turns"][0])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise ConfigError(f"{place} is not a JSON object with question_id, category and turns[]") from None
    if not isinstance(prompt.text, str) or not isinstance(prompt.category, str):
        raise ConfigError(f"{place}: category and turns[0] must be strings")
    if not isinstance(prompt.question_id, str | int):
        raise ConfigError(f"{place}: question_id must be a string or an integer")
    return prompt
