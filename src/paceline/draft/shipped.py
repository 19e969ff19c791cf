"""Files of trained drafters: those that ship, and how well training says they draft."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from paceline.core.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "drafters"  # of package data: fingerprint of the target / name of the drafter
METRICS_FILE = "metrics.jsonl"  # as `paceline train` writes it: a line for each look at held-out texts
_MAX_BYTES, _MAX_DEPTH = 1 << 22, 64


def ships(name: str, fingerprint: str) -> bool:
    """Return True if a drafter ships for a target."""
    return bool(fingerprint) and (FOLDER / fingerprint / name).is_dir()


def shipped_folder(name: str, fingerprint: str) -> Path:
    """Return the folder of a target's shipped drafter. Raises `ConfigError` if there is none."""
    folder = FOLDER / fingerprint / name
    if not ships(name, fingerprint):
        raise ConfigError(
            f"no {name} ships for this target ({fingerprint}); train one with `paceline train {name}` and name "
            f"its folder, --draft {name}:model=FOLDER, or use --draft ngram, which needs no training"
        )
    return folder


def trained_to(folder: Path) -> tuple[float, ...]:
    """Return the share of drafts kept per depth on held-out texts; empty if unreadable."""
    path = folder / METRICS_FILE
    try:
        if path.stat().st_size > _MAX_BYTES:
            return ()
        last = path.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
        shares = tuple(map(float, json.loads(last)["accepted"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()
    falling = all(1 >= a >= b >= 0 for a, b in pairwise((1.0, *shares)))
    return shares if falling and len(shares) <= _MAX_DEPTH else ()
