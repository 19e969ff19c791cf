"""The answers that `generate --capture` wrote, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = "answers.jsonl"  # as serve/terminal/capture.py writes it: train knows the engine by its files alone


@dataclass(frozen=True, slots=True)
class Captured:
    """One prompt and the target's different answers to it."""

    name: str
    prompt_ids: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]  # token ids of each

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers))


def read_answers(folder: Path) -> Iterator[Captured]:
    """Yield every whole line of a folder's answers. Raises `ConfigError` for a file of something else."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield _captured(line, f"{path}, line {number}")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}; `paceline train data` writes it") from None


def _captured(line: bytes, where: str) -> Captured:
    try:
        row = json.loads(line)
        answers = tuple(_ids(answer["token_ids"]) for answer in row["answers"])
        return Captured(str(row["id"]), _ids(row["prompt_ids"]), answers)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{where} is no line that `generate --capture` wrote") from None


def _ids(values: list[int]) -> tuple[int, ...]:
    ids = tuple(values)
    if not ids or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise ValueError
    return ids
