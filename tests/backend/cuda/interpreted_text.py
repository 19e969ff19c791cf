"""Texts with kernels over rows, in Triton's interpreter. Run by `test_row_launches.py`."""

from __future__ import annotations

import pytest

from paceline.backend.cuda.graphs import Uncaptured
from paceline.backend.cuda.kernel_launch import interpreted
from paceline.backend.cuda.step_graphs import StepGraphs
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from tests.backend.cuda.row_states import by_torch
from tests.draft.heads import CORRECTED, drafter_of, trained_head
from tests.engine.same_text import PLAIN, assert_same, make_engine, plain_answers, run, target

REQUESTS = [
    Request(str(i), tuple(range(40 + i, 52)), SamplingParams(temperature=(0.0, 0.8)[i % 2], max_tokens=9), seed=i)
    for i in range(3)
]


@pytest.mark.parametrize("draft", ["draft-model:model=noisy", "eagle3", "peagle", CORRECTED, "ngram:min=1"])
def test_texts_are_those_without_drafts(draft: str) -> None:
    """The model's own numbers are float64, so PyTorch's; steps are padded as captured ones are."""
    assert interpreted()
    with by_torch():
        plain = plain_answers(REQUESTS, "cuda")
    spec = draft if ":" in draft else f"{drafter_of(draft)}:model={trained_head(draft, target().decoder)}"  # type: ignore[arg-type]
    engine = make_engine(f"{spec},k=3", PLAIN, types="cuda")
    late = engine.target
    late.rows.capture = Uncaptured  # type: ignore[attr-defined]
    late.graphs = StepGraphs(late, Uncaptured)  # type: ignore[attr-defined, arg-type]
    assert_same(plain, run(engine, REQUESTS))
    assert engine.stats().drafter_failures == 0
