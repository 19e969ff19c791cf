"""Recorded texts as drafts beside a real drafter: see `draft/lookup/oracle.py`.

Weights by shape are random, so nothing that a drafter guesses would be kept.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy import int64
    from numpy.typing import NDArray

    Answers = Sequence[NDArray[int64]]


def oracle(path: Path, answers: Answers, drafter: str, k: int, acceptance: Sequence[float]) -> str:
    """Write a recording; return the spec of an oracle with a drafter beside it.

    answers: plain texts of requests 0, 1, ...; drafter: such as `eagle3[model=FOLDER]`; acceptance: share of
    drafts that are kept at each position.
    """
    run = {"draft": "off", "concurrency": len(answers), "repeat": 0}
    lines = [json.dumps({**run, "token_ids": answer.tolist()}) for answer in answers]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    rates = "+".join(f"{chance:.6f}" for chance in chances_of(acceptance))
    return f"oracle:file={path},rates={rates},k={k},head={drafter}"


def chances_of(acceptance: Sequence[float]) -> list[float]:
    """Return the chance of a draft at each depth if those before it are kept."""
    before = [1.0, *acceptance]
    return [kept / alive for alive, kept in zip(before, acceptance, strict=False)]
