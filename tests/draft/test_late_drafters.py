"""Drafters of the host and of the target's device: which one is made, and that both draft the same."""

from __future__ import annotations

import pytest

from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.draft.late import LateDrafter
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.lookup.suffix import SuffixDrafter
from tests.engine.same_text import PLAIN, make_engine, run


@pytest.mark.parametrize(
    ("draft", "law", "types", "kind"),
    [
        ("ngram", "coupled", "cuda", LateDrafter),
        ("ngram", "coupled", "f64", NgramDrafter),
        ("ngram", "rejection", "cuda", NgramDrafter),
        ("suffix", "coupled", "cuda", LateDrafter),
        ("suffix", "coupled", "f64", SuffixDrafter),
        ("suffix", "rejection", "cuda", SuffixDrafter),
        ("suffix:shared=100", "coupled", "cuda", SuffixDrafter),
    ],
)
def test_lookups_are_on_the_device_where_target_and_law_let_them(
    draft: str, law: str, types: str, kind: type
) -> None:
    (drafter,) = make_engine(draft, PLAIN, law, types).drafting.drafters.values()
    assert type(drafter) is kind
    assert drafter.needs.late is (kind is LateDrafter)
    assert drafter.report()["match"]


def test_prompt_lookup_drafts_the_same_on_host_and_device() -> None:
    """Text by text: how many drafts were made, verified and kept."""
    requests = [
        Request(str(i), (40, 41, 42, 43, 40 + i), SamplingParams(max_tokens=60, ignore_eos=True), seed=i)
        for i in range(8)
    ]
    counts = []
    for types in ("f64", "cuda"):
        engine = make_engine("ngram:min=1,k=5", PLAIN, types=types)
        run(engine, requests)
        counts.append(engine.stats().drafters["ngram"])
    host, device = counts
    assert host.verified_at[0] > 100
    assert (host.drafted, host.verified_at, host.accepted_at) == (
        device.drafted,
        device.verified_at,
        device.accepted_at,
    )
