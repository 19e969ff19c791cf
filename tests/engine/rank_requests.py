"""Requests whose texts must not depend on how many ranks share a target."""

from __future__ import annotations

from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request


def requests() -> list[Request]:
    """Greedy and sampled, penalised, long and short; some share a beginning."""
    found = []
    for i in range(7):
        params = SamplingParams(
            temperature=[0.0, 0.7, 1.0, 1.4][i % 4],
            top_p=0.9 if i == 3 else 1.0,
            repetition_penalty=1.2 if i == 5 else 1.0,
            max_tokens=[20, 9, 40][i % 3],
            ignore_eos=bool(i % 2),
        )
        stem = tuple(range(40, 75)) if i % 2 else ()
        found.append(Request(str(i), stem + (32 + i, 50, 33) * (1 + i % 3), params, seed=i))
    return found
