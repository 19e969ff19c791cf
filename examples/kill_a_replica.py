"""Kill -9 the replica that writes an answer, and see the answer go on as if nothing had happened.

    python examples/kill_a_replica.py [MODEL]

It starts `paceline serve --replicas 2`, streams an answer twice with one seed, and kills the engine process that
writes the second one. It needs nothing beside Paceline.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER = {
    "prompt": "Once upon a time",
    "max_tokens": 120,
    "temperature": 1.0,
    "seed": 2026,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}
KILL_AT = 40  # tokens


class Stream:
    """One streamed answer: its tokens, and when each chunk came."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.token_ids: list[int] = []
        self.chunk_s: list[float] = []
        self.legs = 0

    def read(self, on_chunk: Callable[[], None] = lambda: None) -> None:
        """Read the answer to its end. on_chunk: called after each chunk with tokens."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(ANSWER), headers)
            response = connection.getresponse()
            for line in response:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line.removeprefix(b"data: ")), on_chunk)

    def _take(self, event: dict[str, Any], on_chunk: Callable[[], None]) -> None:
        if "error" in event:
            sys.exit(f"the answer was lost: {event['error']['message']}")
        self.legs = (event.get("usage") or {}).get("legs", self.legs)
        for choice in event.get("choices", []):
            if ids := choice.get("token_ids"):
                self.token_ids += ids
                self.chunk_s.append(time.monotonic())
                on_chunk()

    def longest_gap_s(self) -> float:
        """Return the longest pause between two chunks."""
        return max(b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False))


def replicas(port: int) -> list[dict[str, Any]]:
    """Return the lines of the fleet's table."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/v1/fleet")
        found: list[dict[str, Any]] = json.load(connection.getresponse())["replicas"]
        return found


def start(model: str) -> tuple[subprocess.Popen[str], int]:
    """Start the server; return it and its port once both replicas are up."""
    command = [sys.executable, "-m", "paceline.cli", "serve", "--replicas", "2", "--port", "0", "--model", model]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own command
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"serves at \S+:(\d+)", line):
            port = int(found[1])
            while [line["state"] for line in replicas(port)] != ["up", "up"]:
                time.sleep(0.1)
            return server, port
    sys.exit("the server ended before it was ready")


def compare(port: int) -> int:
    """Stream twice, kill in between, print; return how many tokens differ."""
    whole = Stream(port)
    whole.read()
    cut = Stream(port)
    killed: list[tuple[str, int]] = []

    def kill_once() -> None:
        if len(cut.token_ids) >= KILL_AT and not killed:
            (writer,) = [line for line in replicas(port) if line["rows"]]
            os.kill(writer["pid"], signal.SIGKILL)
            killed.append((writer["replica"], len(cut.token_ids)))

    cut.read(kill_once)
    replica, at = killed[0]
    longest = max(len(whole.token_ids), len(cut.token_ids))
    same = sum(a == b for a, b in zip(whole.token_ids, cut.token_ids, strict=False))
    whole_ms, cut_ms = 1e3 * whole.longest_gap_s(), 1e3 * cut.longest_gap_s()
    sys.stdout.write(
        f"undisturbed: {len(whole.token_ids)} tokens, longest pause {whole_ms:.0f} ms\n"
        f"replica {replica} killed at token {at}: {len(cut.token_ids)} tokens by {cut.legs} replicas, "
        f"longest pause {cut_ms:.0f} ms\n{longest - same} tokens differ\n"
    )
    return longest - same


def main() -> int:
    """Run the demonstration; the exit status is 0 if no token differs."""
    server, port = start(sys.argv[1] if len(sys.argv) > 1 else "default")
    try:
        return int(compare(port) > 0)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
