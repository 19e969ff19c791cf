"""Measure how bad clients slow good ones: `python -m tools.measure.stress --url U [--prompts FILE.jsonl]`.

Good clients stream answers all the time. Beside them run as many others, calm or stormy in alternating phases.
Calm clients read a few tokens to the end. Stormy clients ask for many tokens, disconnect after a few, and send a
body of 10 MB. The engine computes the same for the others in both phases, so the p99 TPOT of good clients shows
what their behaviour costs.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from http.client import HTTPException
from itertools import cycle
from threading import Event
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.bench.load import DrivenServer, drive, driven_server
from paceline.bench.prompt_file import Prompt, read_prompts
from paceline.bench.statistics import percentile
from paceline.core.errors import EngineDied
from paceline.serve.terminal.running_server import ANSWER_S
from tools.entry import add_prompts, exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

FEW_TOKENS = 8
BIG_BODY = {"messages": "x" * 10_000_000}
ROUTE = "/v1/chat/completions"


def calm(target: DrivenServer, prompt: Prompt) -> None:
    """Ask for a few tokens and read them all."""
    _stream(target, prompt, max_tokens=FEW_TOKENS, num_lines=1 << 20)


def stormy(target: DrivenServer, prompt: Prompt) -> None:
    """Ask for many tokens, disconnect after a few, send a body that is too large."""
    _stream(target, prompt, max_tokens=512, num_lines=2 * FEW_TOKENS)
    refused = OSError, HTTPException, EngineDied  # while it is still being sent, as it should be
    with closing(target.server.connection(ANSWER_S)) as connection, suppress(*refused):
        target.server.asked(connection, "POST", ROUTE, BIG_BODY).read()


def _stream(target: DrivenServer, prompt: Prompt, max_tokens: int, num_lines: int) -> None:
    messages = [{"role": "user", "content": prompt.text[:400]}]
    body = {**target.body, "messages": messages, "max_tokens": max_tokens}
    with closing(target.server.connection(ANSWER_S)) as connection:
        response = target.server.asked(connection, "POST", ROUTE, body)
        while num_lines > 0 and response.readline():
            num_lines -= 1


BEHAVIOURS = {"calm": calm, "storm": stormy}


def phase(target: DrivenServer, prompts: Sequence[Prompt], behaviour: str, clients: int) -> list[float]:
    """Return the TPOT of every good answer in ms, beside clients of a behaviour."""
    over, others = Event(), cycle(prompts)

    def misbehave() -> None:
        while not over.is_set():
            BEHAVIOURS[behaviour](target, next(others))

    with ThreadPoolExecutor(clients) as pool:
        bad = [pool.submit(misbehave) for _ in range(clients)]
        answers = drive(target, prompts, clients, None, seed=0)
        over.set()
    for future in bad:
        future.result()
    return [s * 1e3 for answer in answers if (s := answer.tpot_s) is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = ArgumentParser(prog="python -m tools.measure.stress", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", required=True)
    add_prompts(parser)
    parser.add_argument("--limit", type=int, default=24, metavar="N", help="good answers in each phase")
    parser.add_argument("--clients", type=int, default=4, metavar="C", help="good clients, and as many others")
    parser.add_argument("--phases", type=int, default=3, metavar="P", help="calm and stormy phases of each kind")
    args = parser.parse_args(argv)
    target = driven_server(args.url, {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True})
    prompts = [replace(p, text=p.text[:400]) for p in read_prompts(args.prompts, args.limit)]
    measured: dict[str, list[float]] = {name: [] for name in BEHAVIOURS}
    for name in track(list(BEHAVIOURS) * args.phases, "measuring", console=Console(stderr=True)):
        measured[name] += phase(target, prompts, name, args.clients)
    table = Table("others", "answers", "TPOT ms p50", "p99", title="TPOT of good clients")
    for name, times in measured.items():
        table.add_row(name, str(len(times)), f"{percentile(times, 0.5):.1f}", f"{percentile(times, 0.99):.1f}")
    Console().print(table)
    ratio = percentile(measured["storm"], 0.99) / percentile(measured["calm"], 0.99)
    Console().print(f"p99, storm over calm: {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
