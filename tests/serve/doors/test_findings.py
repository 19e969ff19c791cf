"""Findings that have no file of their own: the doubled chunk, and what belongs to a release."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.serve.conftest import PATIENCE_S, running
from tests.serve.test_faults import LONG, eventually

if TYPE_CHECKING:
    from tests.serve.conftest import Server

ROOT = Path(__file__).parents[3]
SEEDED = LONG | {"seed": 5, "max_tokens": 8000}


def streamed(server: Server, kill_after: int | None = None) -> tuple[str, bool]:
    """Text of a stream, and True if it ended with an error. kill_after: chunks, then the engine is killed."""
    text, failed = "", False
    with (
        httpx.Client(timeout=PATIENCE_S) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=SEEDED | {"stream": True}) as response,
    ):
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        for number, line in enumerate(lines):
            if line == "[DONE]":
                break
            event = json.loads(line)
            failed = failed or "error" in event
            text += "".join(choice["text"] for choice in event.get("choices", ()))
            if number == kill_after:
                os.kill(server.engine_pid(), signal.SIGKILL)
    return text, failed


def test_what_came_before_the_engine_died_is_the_beginning_of_the_answer(model: Path) -> None:
    """H1: no chunk is sent twice; the partial text is a prefix of the undisturbed one."""
    with running(model) as server:
        whole, failed = streamed(server)
        assert not failed
        for kill_after in (3, 20):
            part, failed = streamed(server, kill_after)
            assert failed
            assert part
            assert whole.startswith(part)
            assert eventually(lambda: server.health() == 200)


def test_a_release_has_its_papers() -> None:
    """L8: licence, notice, an address for reports, and locks with a hash for every file."""
    for name in ("LICENSE", "NOTICE", "SECURITY.md"):
        assert (ROOT / name).read_text().strip()
    for lock in ("runtime.txt", "dev.txt", "build.txt", "wheel.txt"):
        lines = (ROOT / "scripts" / "requirements" / lock).read_text().replace("\\\n", " ").splitlines()
        pinned = [line for line in lines if line.strip() and not line.lstrip().startswith(("#", "-"))]
        assert pinned
        assert all("==" in line and "--hash=sha256:" in line for line in pinned), lock
