"""Answers written to disk to train draft heads on: `paceline generate --capture DIR`.

DIR/answers.jsonl has a line for each prompt: its token ids and those of its distinct answers. A run that was
interrupted resumes: a prompt that already has a line for the same parameters is not asked again.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO

from paceline.core.errors import ConfigError
from paceline.serve.api.openai_format import to_json
from paceline.serve.terminal.display import progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline.core.params import SamplingParams
    from paceline.serve.llm import LLM
    from paceline.serve.prompts import Item
    from paceline.serve.results import Completion

FILE = "answers.jsonl"
_SEED_BYTES = 7  # bytes of a key that make a seed, which is then below 2**63


def capture(llm: LLM, items: Sequence[Item], params: SamplingParams, folder: Path, *, chat: bool) -> int:
    """Answer every prompt without a line; append each at once. Returns 1 if one failed.

    If `params` has no seed, each prompt's seed is made from its token ids, so that every run writes the same data.
    """
    wanted: dict[str, tuple[Item, tuple[int, ...]]] = {}
    for item in items:
        prompt_ids = item.asked(llm.prompts, params, chat=chat).ids
        wanted.setdefault(key_of(prompt_ids, params), (item, prompt_ids))
    with open_to_append(folder / FILE) as (file, done):
        missing = [key for key in wanted if key not in done]
        failed = 0

        def keep(index: int, completion: Completion) -> None:
            nonlocal failed
            line = _line(missing[index], wanted[missing[index]][0], completion)
            failed += not line["answers"]
            if line["answers"]:
                file.write(to_json(line) + b"\n")
                file.flush()
            update(next(ended), len(wanted))

        num_done = len(wanted) - len(missing)
        ended = count(num_done + 1)
        with progress("answers", quiet=True) as update:
            update(num_done, len(wanted))
            seeded = [params if params.seed is not None else replace(params, seed=_seed(key)) for key in missing]
            llm.generate([wanted[key][1] for key in missing], seeded, keep)
    return int(failed > 0)


def key_of(prompt_ids: Sequence[int], params: SamplingParams) -> str:
    """Return the hash of a prompt and the parameters it is asked with."""
    asked = [(f.name, getattr(params, f.name)) for f in fields(params)]
    return hashlib.sha256(repr((tuple(prompt_ids), asked)).encode()).hexdigest()


def _seed(key: str) -> int:
    return int.from_bytes(bytes.fromhex(key)[:_SEED_BYTES], "little")


@contextmanager
def open_to_append(path: Path) -> Iterator[tuple[BinaryIO, set[str]]]:
    """Open a JSON-lines file to append; drop a cut last line. Returns its keys.

    Raises `ConfigError` if it cannot be written, now or later: closing it fails on a full disk, too.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            keys, end = set(), 0
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    keys.add(_key_in(line, f"{path}, line {number}"))
                    end += len(line)
            file.truncate(end)
            yield file, keys
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _key_in(line: bytes, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        raise ConfigError(f"{where} is not a line that --capture wrote; give another folder")
    return str(row["key"])


def _line(key: str, item: Item, completion: Completion) -> dict[str, Any]:
    """Return one prompt's line, without failed answers and with equal answers once."""
    answers = {a.token_ids: a.finish_reason for a in completion.choices if a.error is None and a.token_ids}
    return {
        "key": key,
        "id": item.name,
        "prompt_ids": completion.prompt_ids,
        "answers": [{"token_ids": ids, "finish_reason": reason} for ids, reason in answers.items()],
    }
