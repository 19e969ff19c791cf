"""Attack a server beside a steady client: `python -m tools.attack --url U [--seconds N] [ATTACK...]`.

The steady client asks for the same seeded answer all the time, first alone, then beside each attack. Its texts
have to stay equal, its p99 within twice the calm one's, and /health has to answer. The attackers run in a process
of their own, at the lowest priority where they share the machine.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from argparse import ArgumentParser
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from multiprocessing import get_context
from threading import Event, Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from paceline.bench.statistics import percentile
from paceline.core.errors import ConfigError
from tools.entry import exit_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Address = tuple[str, int]

ASKED = {
    "prompt": "The cat sat on the mat, and",
    "max_tokens": 24,
    "seed": 7,
    "temperature": 0.8,
    "ignore_eos": True,
}
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BAR = 2.0  # times the calm client's p99
HEALTH_S = 0.2  # between two questions


def idle(address: Address, until_s: float, count: int) -> None:
    """Hold connections that send nothing, opened anew when they are closed."""
    held: list[socket.socket] = []
    while time.monotonic() < until_s:
        with suppress(OSError):
            held = [*held[-count + 1 :], socket.create_connection(address, 5.0)]
        if len(held) >= count:
            time.sleep(0.01)


def slowloris(address: Address, until_s: float) -> None:
    """Send headers a byte at a time on 300 connections."""
    held = [_open(address) for _ in range(300)]
    while time.monotonic() < until_s:
        for at, one in enumerate(held):
            try:
                one.send(b"a")
            except OSError:
                held[at] = _open(address)
        time.sleep(1.0)


def _open(address: Address) -> socket.socket:
    found = socket.create_connection(address, 5.0)
    found.send(b"GET /v1/models HTTP/1.1\r\nx: ")
    return found


def large_bodies(address: Address, until_s: float) -> None:
    """Send 3.9 of 4 MB of a body on each of 200 connections."""
    part = b"a" * 3_900_000
    held: list[socket.socket] = []
    while time.monotonic() < until_s:
        if len(held) < 200:
            with suppress(OSError):
                one = socket.create_connection(address, 5.0)
                one.sendall(POST + b"content-length: 4000000\r\n\r\n")
                one.sendall(part)
                held.append(one)
        else:
            time.sleep(0.1)


def chunk_storm(address: Address, until_s: float) -> None:
    """Send 14 MB in chunks of two bytes on four connections, again and again."""
    storm = b"2\r\naa\r\n" * 500_000
    while time.monotonic() < until_s:
        for _ in range(4):
            with suppress(OSError), socket.create_connection(address, 5.0) as one:
                one.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
                one.sendall(storm)
        time.sleep(0.05)


def never_read(address: Address, until_s: float) -> None:
    """Ask for the longest lists of metrics on 40 connections, and read none."""
    held: list[socket.socket] = []
    while time.monotonic() < until_s:
        with suppress(OSError):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.connect(address)
            one.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 16)
            held = [*held[-39:], one]
        time.sleep(0.1)


ATTACKS: dict[str, Callable[[Address, float], None]] = {
    "idle-1100": lambda address, until_s: idle(address, until_s, 1100),
    "idle-4200": lambda address, until_s: idle(address, until_s, 4200),
    "slowloris": slowloris,
    "large-bodies": large_bodies,
    "chunk-storm": chunk_storm,
    "never-read": never_read,
}


def _attack(name: str, address: Address, seconds: float) -> None:
    """Run one attack in a process of its own."""
    os.nice(19)
    ATTACKS[name](address, time.monotonic() + seconds)


@dataclass
class Seen:
    """Answers of the steady client and of health checks."""

    texts: set[str] = field(default_factory=set)
    times_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    health: list[tuple[int, float]] = field(default_factory=list)


def watched(address: Address, seconds: float) -> Seen:
    """Ask for answers and for health for so long."""
    seen, over = Seen(), Event()

    def check() -> None:
        while not over.wait(HEALTH_S):
            start_s = time.monotonic()
            try:
                status = _ask(address, "GET", "/health")[0]
            except (OSError, HTTPException):
                status = 0
            seen.health.append((status, time.monotonic() - start_s))

    checking = Thread(target=check)
    checking.start()
    for start_s in _moments(seconds):
        try:
            status, body = _ask(address, "POST", "/v1/completions", json.dumps(ASKED))
            if status != 200:
                raise HTTPException(f"status {status}")
            seen.texts.add(json.loads(body)["choices"][0]["text"])
            seen.times_s.append(time.monotonic() - start_s)
        except (OSError, HTTPException) as error:
            seen.failures.append(repr(error))
    over.set()
    checking.join()
    return seen


def _moments(seconds: float) -> Iterator[float]:
    end_s = time.monotonic() + seconds
    while (now_s := time.monotonic()) < end_s:
        yield now_s


def _ask(address: Address, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection(*address, timeout=60.0)
    try:
        headers = {"content-type": "application/json"}
        if key := os.environ.get("PACELINE_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def main() -> int:
    """Attack as the command line says; return 1 if a bar was missed."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)} (default: all)")
    args = parser.parse_args()
    if unknown := set(args.attacks) - set(ATTACKS):
        raise ConfigError(f"no attack is called {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
    url = urlsplit(args.url)
    address = (url.hostname or "localhost", url.port or 80)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    watched(address, 2.0)  # warm
    calm = watched(address, args.seconds)
    table, missed = Table("attack", "answers", "equal texts", "p50", "p99", "of the calm p99", "/health"), False
    for name in ("none", *(args.attacks or ATTACKS)):
        seen = calm
        if name != "none":
            attacker = get_context("spawn").Process(target=_attack, args=(name, address, args.seconds + 2))
            attacker.start()
            time.sleep(2.0)
            seen = watched(address, args.seconds)
            attacker.join()
        ratio = percentile(seen.times_s, 0.99) / percentile(calm.times_s, 0.99) if seen.times_s else float("inf")
        equal = seen.texts == calm.texts and len(calm.texts) == 1 and not seen.failures
        healthy = all(status == 200 for status, _ in seen.health)
        missed = missed or not equal or not healthy or ratio > BAR
        worst_s = max((taken_s for _, taken_s in seen.health), default=0.0)
        table.add_row(
            name,
            str(len(seen.times_s)),
            "yes" if equal else f"no {seen.failures[:1]}",
            *(f"{1e3 * percentile(seen.times_s or [0.0], share):.0f} ms" for share in (0.5, 0.99)),
            f"{ratio:.2f}",
            f"{'200' if healthy else sorted({s for s, _ in seen.health})}, worst {1e3 * worst_s:.0f} ms",
        )
    Console().print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(exit_status(main))
