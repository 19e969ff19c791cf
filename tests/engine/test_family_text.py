"""Promise 1 for every family: drafts of every kind of model leave the text as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from paceline.backend.registry import backend_spec
from paceline.core.errors import UnsupportedModel
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.draft.drafter import DraftWeights, Vocabulary
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from paceline.model.families import FAMILIES
from paceline.model.weights import load_model
from tests.engine.same_text import DRAFTER_NOISE, SHARP, VOCAB, assert_same, make_decoder, run
from tests.tiny import tiny_config, tiny_tokenizer, tiny_weights

if TYPE_CHECKING:
    from tests.engine.same_text import Answer

REQUESTS = [
    Request(
        str(i), (*range(40 + i, 75 + 3 * i), *range(40, 50)), SamplingParams(temperature=t, max_tokens=20), seed=i
    )
    for i, t in enumerate((0.0, 0.7, 1.2))
]
DRAFTS = ("suffix:k=4", "draft-model:model=noisy,k=4", "draft-model:layers=2,k=3", "eagle3:model=shape:eagle3,k=3")


def answers(family: str, draft: str, num_rows: int, prefill: int) -> dict[str, Answer]:
    config = tiny_config(family, vocab_size=VOCAB, num_layers=3, eos_ids=(VOCAB - 1,))
    weights = tiny_weights(config, seed=4, embed_scale=SHARP)
    target = build.Loaded("tiny", make_decoder(config, weights, "int8"), tiny_tokenizer(VOCAB), None, "tiny")

    def drafter(name: str, _: str | None) -> DraftWeights:
        other = tiny_weights(config, seed=5, embed_scale=SHARP)
        near = {n: w + DRAFTER_NOISE * other[n] for n, w in weights.items()}
        return DraftWeights(make_decoder(config, near, "int8"), Vocabulary(name, target.tokenizer, VOCAB))

    limits = Limits(num_rows, 256, prefill)
    engine = build.assemble(
        EngineConfig(draft=draft, weights="int8", kv="i16", limits=limits), target, drafter
    ).engine
    return run(engine, REQUESTS)


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("llama", "mistral", "qwen2", "qwen3")]
)
def test_drafts_leave_the_text_as_it_is(family: str) -> None:
    expected = answers(family, "off", 1, 512)
    for index, draft in enumerate(DRAFTS):
        assert_same(expected, answers(family, draft, 1 + index, (7, 512, 16, 33)[index]))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_shapes(family: str) -> None:
    model = load_model(f"shape:family={family},hidden_size=64,intermediate_size=64,num_heads=2,num_kv_heads=1")
    assert model.config.family == family
    spec = backend_spec("cuda")
    if model.config.needs:
        with pytest.raises(UnsupportedModel, match=r"needs .*: choose --backend native or reference"):
            spec.check_model(model.config)
    else:
        spec.check_model(model.config)
    for name in ("native", "reference"):
        backend_spec(name).check_model(model.config)
    assert all(torch.isfinite(torch.as_tensor(model.weights[name])).all() for name in ("embed", "final_norm"))
