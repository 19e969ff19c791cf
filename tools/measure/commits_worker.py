"""One checkout's engines, asked by `tools.measure.commits`: JSON lines in, JSON lines out.

It runs with the sources of the checkout that is measured, so it uses the Python API and nothing else of them.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from hashlib import sha256
from time import perf_counter
from typing import Any

from paceline import LLM, SamplingParams

try:
    from paceline.core.request_nouns import Request
except ImportError:  # of older checkouts
    from paceline.core.nouns import Request  # type: ignore[attr-defined, no-redef]

COUNTERS = ("steps", "step_s", "draft_s", "target_s", "control_s", "hidden_s", "overlapped_s")


class Asker:
    """Asks one engine the same questions again and again, a fixed number in flight."""

    def __init__(self, draft: str, model: str, num_rows: int) -> None:
        self._llm = LLM(model, draft=draft, num_rows=num_rows, max_len=2048)
        self._engine = self._llm.built.engine
        self._waiting: deque[Request] = deque()
        self._inflight = 0
        self._text = sha256()
        self.concurrency = 1

    def ask(self, texts: list[str], concurrency: int, max_tokens: int, tag: str) -> None:
        """Queue the questions of one repeat."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        ids = [self._llm.prompts.of_messages([{"role": "user", "content": text}]) for text in texts]
        self._waiting = deque(Request(f"{tag}-{i}", p, params, i) for i, p in enumerate(ids))
        self.concurrency = concurrency
        self._answers: dict[str, list[int]] = {}

    def play(self, seconds: float) -> dict[str, Any]:
        """Take steps for some seconds or until all questions are answered."""
        start, tokens, before = perf_counter(), 0, self._counters()
        while (self._waiting or self._inflight) and perf_counter() - start < seconds:
            while self._waiting and self._inflight < self.concurrency:
                self._engine.add(self._waiting.popleft())
                self._inflight += 1
            for outcome in self._engine.step():
                tokens += len(outcome.token_ids)
                self._answers.setdefault(outcome.request_id, []).extend(outcome.token_ids)
                self._inflight -= outcome.finish_reason is not None
        loop = self._engine.loop
        # Time a launched pass in the slice that launched it. Older checkouts call the method `rest`.
        getattr(loop, "wait", getattr(loop, "rest", int))()
        spent = {name: value - before[name] for name, value in self._counters().items()}
        done = not (self._waiting or self._inflight)
        answers = json.dumps(sorted(self._answers.items())) if done else ""
        reply = {"tokens": tokens, "seconds": perf_counter() - start, "done": done, "counters": spent}
        return reply | {"hash": sha256(answers.encode()).hexdigest()[:16] if done else None}

    def forget(self) -> None:
        """Start cold: caches and history are emptied."""
        self._engine.forget()

    def _counters(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {name: float(getattr(stats, name)) for name in COUNTERS if hasattr(stats, name)}


def main() -> None:
    """Answer orders until there are no more."""
    setup = json.loads(sys.stdin.readline())
    askers = {draft: Asker(draft, setup["model"], setup["num_rows"]) for draft in setup["drafts"]}
    _reply({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        asker = askers[order["draft"]]
        if order["do"] == "ask":
            asker.forget()
            asker.ask(order["texts"], order["concurrency"], order["max_tokens"], order["tag"])
            _reply({})
        else:
            _reply(asker.play(order["seconds"]))


def _reply(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
