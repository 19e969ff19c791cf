"""Every family and feature against transformers, on both backends that run all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from paceline import kernels
from paceline.backend.native.load import pack_decoder
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.model.weights import load_model
from tests.model.families import CASES, family_model
from tests.model.helpers import logits_of, pack, run_pass

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.model.weights import LoadedModel

IDS = [(11 * i * i + 5 * i) % 320 for i in range(200)]
SHUFFLED = [(5 * i + 3) % 13 for i in range(13)]
LOGITS = SamplingSpec("logits", SamplingParams(temperature=0.0))


def native_logits(loaded: LoadedModel, chunk: int) -> np.ndarray:
    decoder = pack_decoder(loaded.config, loaded.weights, kernels.ThreadPool(1), "f32", "f32")
    kv, parts = decoder.new_kv(13), []
    for start in range(0, len(IDS), chunk):
        packed = pack([(IDS[start : start + chunk], start, SHUFFLED)])
        parts.append(run_pass(decoder, packed, kv, [LOGITS] * len(packed.wanted)).logits)
    return np.concatenate(parts)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = family_model(case)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    loaded = load_model(tmp_path)
    decoder = ReferenceDecoder(loaded.config, loaded.weights, torch.float32)
    for chunk in (1 << 20, 33):
        assert (logits_of(decoder, IDS, chunk, SHUFFLED) - expected).abs().max() < 1e-4
        assert np.abs(native_logits(loaded, chunk) - expected.numpy()).max() < 1e-4
