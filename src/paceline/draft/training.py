"""What a trained drafter's folder tells of its training."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FILE = "metrics.jsonl"  # as `paceline train` writes it: a line for each look at held-out texts
_MOST_BYTES, _MOST_DEPTH = 1 << 22, 64


def trained_to(folder: Path) -> tuple[float, ...]:
    """Return which share of drafts was kept at each depth in the last look; empty where the folder does not say.

    Only a first guess is made of it, so a file that cannot be read is none.
    """
    path = folder / FILE
    try:
        if path.stat().st_size > _MOST_BYTES:
            return ()
        last = path.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
        shares = tuple(map(float, json.loads(last)["accepted"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()
    falling = all(1 >= a >= b >= 0 for a, b in pairwise((1.0, *shares)))
    return shares if falling and len(shares) <= _MOST_DEPTH else ()
