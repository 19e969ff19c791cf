"""Choices of `auto` on a host, at the prices of an H200.

    python -m tools.measure.device_prices [--rows 1,4,16,64,128,256]

A tiny model runs on the host. The time of its passes and of its drafting is replaced by prices read off
docs/results/gpu.md: Llama-3.1-8B by shape with an EAGLE-3 head. Prices are multiplied, so that the host's own time
is nothing beside them. Drafts are kept as in the proposal of Dynamic SD. `auto` measures its prices first, as on a
device, and is then compared with a fixed K while all rows decode.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from paceline.backend.cuda.buckets import bucket
from paceline.backend.cuda.late_target import LatePass
from paceline.bench.interleave import cancel_all
from paceline.control.fixed import FixedK
from paceline.engine.assembly import calibration
from paceline.serve.terminal.display import plain_table
from tools.gpu.engines import WARM_STEPS, answer_all, begin_all, load_target, make_engine, make_requests
from tools.gpu.recorded import oracle
from tools.gpu.sizes import DRY, SEED_ACCEPTANCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.cuda.record import Record
    from paceline.core.request_nouns import Request
    from paceline.engine.engine import Engine

TIMES = 100.0  # by which prices are multiplied
# ms of a pass by its tokens, keys left out. The longest is extrapolated.
PASS_MS = dict(
    zip(
        (1, 2, 4, 8, 16, 24, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048),
        (4.16, 4.19, 4.23, 4.28, 4.4, 4.5, 4.6, 4.9, 5.5, 6.5, 7.7, 11.2, 14.0, 21.0, 26.3, 50.0),
        strict=True,
    )
)
KEY_MS, LEAST_KEYS_MS = 5.07e-4, 0.27  # of ten keys, as texts here are a tenth as long; of all keys at least
DRAFT_KS = (0, 1, 3, 5, 8)
DRAFT_MS = {  # rows -> ms of drafts, by `DRAFT_KS`; the last is extrapolated
    1: (0.0, 0.44, 1.04, 1.65, 2.64),
    4: (0.0, 0.44, 1.06, 1.68, 2.69),
    16: (0.0, 0.48, 1.17, 1.86, 2.98),
    64: (0.0, 0.70, 1.52, 2.49, 3.98),
    128: (0.0, 1.68, 2.09, 3.38, 5.41),
    256: (0.0, 3.26, 3.42, 5.5, 8.8),
}
KS = (0, 1, 3, 5)
PROMPT, ANSWER, LONGEST = 8, 90, 1500  # tokens


class Prices:
    """Prices of a device in place of times, and what was spent."""

    def __init__(self) -> None:
        self.spent_ms = 0.0

    def set(self, asked: LatePass, record: Record) -> Record:
        """Make a record tell what its step would have taken."""
        batch, draft = asked.batch, asked.draft
        counts = [0] * len(batch.rows) if draft.is_empty else [len(d.token_ids) for d in draft.rows]
        verified = sum(counts) if draft.budget is None else min(sum(counts), draft.budget)
        tokens = bucket(sum(r.num_known for r in batch.rows) + verified)
        keys_ms = max(LEAST_KEYS_MS, KEY_MS * sum(r.max_len for r in batch.rows))
        pass_ms = float(np.interp(tokens, list(PASS_MS), list(PASS_MS.values()))) + keys_ms
        drafted = [count for count in counts if count]
        draft_ms = self._draft_ms(len(drafted), max(drafted)) if drafted else 0.0
        record.seconds, record.draft_s = TIMES * pass_ms / 1e3, TIMES * draft_ms / 1e3
        self.spent_ms += pass_ms + draft_ms
        return record

    @staticmethod
    def _draft_ms(rows: int, k: int) -> float:
        by_k = [np.interp(rows, list(DRAFT_MS), column) for column in zip(*DRAFT_MS.values(), strict=True)]
        return float(np.interp(k, DRAFT_KS, by_k))


def ms_a_token(engine: Engine, requests: Sequence[Request], prices: Prices) -> float:
    """Return what a token costs while all requests decode."""
    begin_all(engine, requests)
    for _ in range(WARM_STEPS):
        engine.step()
    before, tokens, ended = prices.spent_ms, 0, False
    while not ended:
        outcomes = engine.step()
        tokens += sum(len(o.token_ids) for o in outcomes)
        ended = any(o.finish_reason is not None for o in outcomes)
    cancel_all(engine, [r.request_id for r in requests])
    return len(requests) * (prices.spent_ms - before) / tokens


def lines_of(counts: Sequence[int], folder: Path) -> list[tuple[str, ...]]:
    """Return ms a token under each K and `auto`, by rows."""
    prices, enqueue = Prices(), LatePass._enqueue
    setting: Any = SimpleNamespace(device=torch.device("cpu"), sizes=DRY)
    config, loaded = load_target(setting, DRY.model, "f64")
    requests = make_requests(max(counts), PROMPT, ANSWER, loaded.decoder.config.vocab_size)
    recorded = answer_all(make_engine(config, loaded, "off", max(counts), LONGEST), requests, max(counts))
    spec = oracle(folder / "plain.jsonl", recorded, f"eagle3[model={DRY.head}]", max(KS), SEED_ACCEPTANCE)
    found = []
    with (
        patch.object(LatePass, "_enqueue", lambda asked: prices.set(asked, enqueue(asked))),
        patch.object(calibration, "DEVICE_SECONDS", 9 * TIMES),
    ):
        engine = make_engine(config, loaded, f"auto:{spec}", max(counts), LONGEST)
        auto, (name,) = engine.controller, engine.drafting.drafters
        for rows in counts:
            ways = [FixedK(name, k) for k in KS]
            each = []
            for engine.controller in (*ways, auto):
                each.append(ms_a_token(engine, requests[:rows], prices))
            found.append((str(rows), *(f"{ms:.2f}" for ms in each), f"{each[-1] / each[0]:.2f}"))
    return found


def main() -> int:
    """Measure and print a table."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1,4,16,64,128,256", metavar="N,...")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, PACELINE_CACHE=folder):
        found = lines_of([int(n) for n in args.rows.split(",")], Path(folder))
    columns = ("rows", *(f"K = {k}" for k in KS), "auto", "auto over K = 0")
    sys.stdout.write(plain_table("ms a token", columns, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
