"""Two checkouts in one interleaved run: `python -m tools.measure.commits OLD NEW --prompts FILE.jsonl`.

Each checkout is a folder with a built package; its engines live in a process of their own. The processes take
slices of a second, the one that is behind first, and the other one is stopped meanwhile. Both are asked the same
questions with the same seeds; their answers are compared, too.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.prompt_file import read_prompts, spread
from tools.entry import add_prompts, exit_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SLICE_S = 0.7  # seconds that one checkout computes before the other one does
WORKER = Path(__file__).with_name("commits_worker.py")


class Checkout:
    """A worker process over one checkout's sources, stopped by a signal between orders."""

    def __init__(self, folder: Path, setup: Mapping[str, Any]) -> None:
        environment = os.environ | {"PYTHONPATH": str(folder / "src")}
        self._process = subprocess.Popen(  # noqa: S603 (our own worker)
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.ask(setup)

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Send the worker an order and return its reply."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended; see its message above")
        self._process.send_signal(signal.SIGSTOP)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the worker."""
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()


def run_cell(checkouts: Sequence[Checkout], order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ask all checkouts the same questions in slices; return tokens, seconds, counters and answer hashes."""
    totals: list[dict[str, Any]] = [
        {"tokens": 0, "seconds": 0.0, "done": False, "counters": {}} for _ in checkouts
    ]
    for checkout in checkouts:
        checkout.ask({**order, "do": "ask"})
    while unfinished := [i for i, total in enumerate(totals) if not total["done"]]:
        index = min(unfinished, key=lambda i: totals[i]["tokens"])
        reply = checkouts[index].ask({"do": "play", "draft": order["draft"], "seconds": SLICE_S})
        total = totals[index]
        total["tokens"] += reply["tokens"]
        total["seconds"] += reply["seconds"]
        total["done"], total["hash"] = reply["done"], reply["hash"]
        for name, value in reply["counters"].items():
            total["counters"][name] = total["counters"].get(name, 0.0) + value
    return totals


def per_step(total: Mapping[str, Any]) -> dict[str, float]:
    """Return steps, and milliseconds of a step: of drafting, pass, controller and host.

    The host's time is neither drafting nor the target's pass; it includes the controller's.
    """
    c: dict[str, float] = total["counters"]
    in_both = c.get("overlapped_s", 0.0) + c.get("hidden_s", 0.0)  # seconds counted as the pass' and as the host's
    host_s = c["step_s"] - c["draft_s"] - c["target_s"] + in_both
    seconds = {"draft": c["draft_s"], "target": c["target_s"], "control": c["control_s"], "host": host_s}
    return {"steps": c["steps"]} | {f"{name}_ms": 1e3 * s / max(c["steps"], 1.0) for name, s in seconds.items()}


def medians(totals: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the medians over repeats of a checkout: tokens per second, and `per_step`."""
    repeats = [per_step(total) | {"tokens_per_s": total["tokens"] / total["seconds"]} for total in totals]
    return {name: statistics.median(repeat[name] for repeat in repeats) for name in repeats[0]}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print one line for each drafter and number in flight."""
    parser = ArgumentParser(prog="python -m tools.measure.commits", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=Path, help="folder of the checkout to compare with")
    parser.add_argument("new", type=Path, help="folder of the checkout that is compared")
    add_prompts(parser)
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", action="append", help="drafters (default: off and auto)")
    parser.add_argument("--concurrency", default="1,4,16,64", help="numbers of requests in flight")
    parser.add_argument("--limit", type=int, default=0, help="questions of a repeat; 0: a number by concurrency")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    drafts, sizes = args.draft or ["off", "auto"], [int(c) for c in args.concurrency.split(",")]
    setup = {"model": args.model, "drafts": drafts, "num_rows": max(sizes)}
    prompts = read_prompts(args.prompts)
    checkouts = [Checkout(folder.resolve(), setup) for folder in (args.old, args.new)]
    cells = []
    try:
        for size in sizes:
            texts = [p.text for p in spread(prompts, args.limit or max(8, 3 * size // 2))]
            for draft in drafts:
                cells.append(_measure(checkouts, draft, size, texts, args))
                _print(cells[-1])
                if args.json:
                    args.json.write_text(json.dumps(cells, indent=1) + "\n")
    finally:
        for checkout in checkouts:
            checkout.close()
    return 0


def _measure(
    checkouts: Sequence[Checkout], draft: str, size: int, texts: Sequence[str], args: Any
) -> dict[str, Any]:
    order = {"draft": draft, "texts": list(texts), "concurrency": size, "max_tokens": args.max_tokens}
    run_cell(checkouts, order | {"tag": "warm", "texts": list(texts[: max(2, size)])})
    repeats = []
    for repeat in range(args.repeat):
        turned = checkouts if repeat % 2 == 0 else checkouts[::-1]  # neither is always first
        totals = run_cell(turned, order | {"tag": str(repeat)})
        repeats.append(totals if repeat % 2 == 0 else totals[::-1])
    ratios = [old["seconds"] / new["seconds"] for old, new in repeats]
    return {
        "draft": draft,
        "concurrency": size,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "old": medians([old for old, _ in repeats]),
        "new": medians([new for _, new in repeats]),
        "same_text": all(old["hash"] == new["hash"] for old, new in repeats),
    }


def _print(cell: Mapping[str, Any]) -> None:
    ratios, old, new = ", ".join(f"{r:.3f}" for r in cell["ratios"]), cell["old"], cell["new"]
    sys.stdout.write(
        f"{cell['draft']:<6}{cell['concurrency']:>3} in flight: {cell['ratio']:.3f} of the old speed ({ratios}); "
        f"{old['tokens_per_s']:.0f} -> {new['tokens_per_s']:.0f} tokens/s; "
        f"host {old['host_ms']:.3f} -> {new['host_ms']:.3f} ms a step; "
        f"{'same text' if cell['same_text'] else 'OTHER TEXT'}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(exit_status(main))
