"""The example on one screen writes what the engine writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from paceline.backend.seam import Packed
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from tests.engine.same_text import PLAIN, draft_weights, make_engine, run, target

if TYPE_CHECKING:
    from paceline.backend.reference.decoder import ReferenceDecoder


def _model(decoder: ReferenceDecoder):
    def logits(token_ids: list[int]) -> np.ndarray:
        places = np.arange(len(token_ids))
        num_pages = -(-len(token_ids) // 16)
        packed = Packed(
            token_ids=np.array(token_ids),
            positions=places,
            slots=places,
            cu_len=np.array([0, len(token_ids)]),
            pages=np.arange(num_pages)[None],
            wanted=places,
        )
        hidden, _ = decoder.forward(packed, decoder.new_kv(num_pages))
        return decoder.logits(hidden).numpy()

    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_example_writes_what_the_engine_writes(temperature: float) -> None:
    path = Path(__file__).parents[2] / "examples" / "speculate_in_50_lines.py"
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    prompt = (40, 41, 42, 40, 41)
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    expected = run(make_engine("ngram:k=4", PLAIN), [Request("r", prompt, params, seed=5)])["r"].token_ids
    models = _model(target().decoder), _model(draft_weights("noisy").decoder)
    assert example.speculate(*models, list(prompt), 24, 3, temperature, 5) == expected
