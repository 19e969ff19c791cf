"""The Python files of one decode step: `python -m tests.decode_path` prints them with their lengths.

A file is on the path if any of its functions runs in one of `STEPS` decode steps of a tiny model on the native
backend. Start-up, admission, prefill and the first `WARM_UP` steps are not traced. The engine's clock counts its
calls, so that the controller chooses the same every time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import paceline
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine import step as step_module
from tests.draft.heads import trained_head
from tests.engine.same_text import PLAIN, STAIRCASE, make_engine, target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from paceline.engine.engine import Engine

SOURCE = Path(paceline.__file__).parent
TYPES = "int8"
WARM_UP, STEPS = 2, 16  # the head is tried in the first steps, before lookup has learnt the text
TICK_S = 1e-3
PROMPT = (5, 9, 13, 7) * 6  # a text that lookup goes on with
MAX_TOKENS = 200
DRAFTS = ("off", "eagle3:k=4", "auto")
BUDGETS = {"off": (14, 2700), "eagle3:k=4": (24, 3800), "auto": (32, 5500)}  # files, lines


def decode_path(draft: str) -> list[str]:
    """Return the files that run in a decode step with one of `DRAFTS`, relative to the package, sorted."""
    return sorted(str(path.relative_to(SOURCE)) for path in map(Path, _files_that_run(draft)))


def num_lines(files: list[str]) -> int:
    """Return the lines of files together, comments and blank lines included."""
    return sum(len((SOURCE / file).read_text(encoding="utf-8").splitlines()) for file in files)


def over_budget(draft: str, budget: tuple[int, int]) -> str | None:
    """Return how a draft's path exceeds a budget of (files, lines); None if it does not."""
    files = decode_path(draft)
    found = len(files), num_lines(files)
    if found[0] <= budget[0] and found[1] <= budget[1]:
        return None
    return f"--draft {draft}: {found[0]} files of {budget[0]}, {found[1]} lines of {budget[1]}: {', '.join(files)}"


@cache
def _files_that_run(draft: str) -> frozenset[str]:
    engine = _engine(draft)
    for token_id in range(engine.tokenizer.vocab_size):
        engine.tokenizer.pieces.visible[token_id]  # bytes are looked up when a token is first seen
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=MAX_TOKENS)
    engine.add(Request("traced", PROMPT, params, seed=1))
    while not engine.scheduler.decoding():
        engine.step()
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    with _counting_clock():
        for _ in range(WARM_UP):
            engine.step()
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            for _ in range(STEPS):
                engine.step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    assert engine.scheduler.decoding(), "the answer ended while it was traced"
    return frozenset(file for file in found if Path(file).is_relative_to(SOURCE))


@contextmanager
def _counting_clock() -> Iterator[None]:
    """Replace the engine's clock by one that advances by `TICK_S` with each call."""
    ticks = count()
    patch = pytest.MonkeyPatch()
    patch.setattr(step_module, "perf_counter", lambda: TICK_S * next(ticks))
    try:
        yield
    finally:
        patch.undo()


def _engine(draft: str) -> Engine:
    if draft == "off":
        return make_engine(draft, PLAIN, types=TYPES)
    head = trained_head("eagle3", target().decoder)  # type: ignore[arg-type]
    if draft != "auto":
        return make_engine(draft.replace(":", f":model={head},"), PLAIN, types=TYPES)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        costs = json.loads(Path(STAIRCASE).read_text(encoding="utf-8"))
        costs["drafters"]["eagle3"] = costs["drafters"].pop("draft-model")
        profile.write_text(json.dumps(costs), encoding="utf-8")
        return make_engine(f"auto:suffix+eagle3:model={head}", PLAIN, types=TYPES, profile=str(profile))


def main() -> None:
    """Print the files of each draft's path, the longest first."""
    for draft in DRAFTS:
        files = decode_path(draft)
        print(f"--draft {draft}: {len(files)} files, {num_lines(files)} lines")  # noqa: T201
        for file in sorted(files, key=lambda f: -num_lines([f])):
            print(f"{num_lines([file]):6} {file}")  # noqa: T201


if __name__ == "__main__":
    main()
