"""Mixture of experts in the engine: the same text with drafts, and prices by the experts that passes touch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from paceline import kernels
from paceline.backend.native.load import pack_decoder
from paceline.backend.registry import BACKENDS
from paceline.core.errors import UnsupportedModel
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.assembly.build import Built, build
from paceline.engine.assembly.calibration import Grid, calibrate
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from paceline.model.experts import Experts
from paceline.model.families import FAMILIES
from tests.engine.same_text import run
from tests.model.helpers import pack, run_pass
from tests.oracles.experts import touched_slow
from tests.tiny import tiny_config, tiny_weights

SMALL = "hidden_size=64,intermediate_size=64,num_layers=3,head_dim=16,vocab_size=300"
MOE = f"shape:family=qwen3_moe,num_experts=16,experts_per_token=4,{SMALL}"
SHARED = f"shape:family=qwen2_moe,num_experts=12,experts_per_token=3,shared_size=96,{SMALL}"
DRAFTS = ("ngram:k=4", "draft-model:layers=2,k=4", "auto")


def built(model: str, draft: str, weights: str = "int4", rows: int = 8) -> Built:
    limits = Limits(num_rows=rows, max_len=192, prefill_tokens=24)
    return build(
        EngineConfig(model=model, draft=draft, weights=weights, backend="native", limits=limits, threads=2)
    )


def requests() -> list[Request]:
    """Prompts that repeat themselves, so that lookup finds drafts; greedy and sampled ones."""
    texts = [list(range(i, i + 7)) * 4 + [i] for i in range(6)]
    return [
        Request(
            str(i),
            tuple(ids),
            SamplingParams(temperature=0.0 if i % 2 else 0.8, max_tokens=40, ignore_eos=True),
            seed=i,
        )
        for i, ids in enumerate(texts)
    ]


@pytest.mark.parametrize(("model", "weights"), [(MOE, "int4"), (MOE, "bf16"), (SHARED, "int8")])
def test_drafts_do_not_change_the_text(model: str, weights: str) -> None:
    expected = run(built(model, "off", weights, rows=1).engine, requests())
    for draft in DRAFTS:
        engine = built(model, draft, weights).engine
        assert run(engine, requests()) == expected
        assert draft == "auto" or any(c.drafted for c in engine.stats().drafters.values())


DENSE_FIRST = replace(FAMILIES["glm4_moe"].mixture.experts(80, 3, 24), num_dense=1, dense_size=56)  # type: ignore[union-attr]


@pytest.mark.parametrize(("family", "experts"), [("qwen3_moe", Experts(80, 3)), ("glm4_moe", DENSE_FIRST)])
def test_a_pass_counts_the_experts_that_it_touches(family: str, experts: Experts) -> None:
    """The pass's own experts, and the means of 1, 2 and 4 neighbours, are as the readable twin counts them."""
    config = tiny_config(family, experts=experts)
    weights = tiny_weights(config)
    decoder = pack_decoder(config, weights, kernels.ThreadPool(2), "f32", "f32")
    ids = [(37 * i * i) % 320 for i in range(21)]
    packed = pack([(ids, 0, [0, 1])])
    spec = SamplingSpec("argmax", SamplingParams(temperature=0.0))
    result = run_pass(decoder, packed, decoder.new_kv(2), [spec] * len(ids))
    assert result.touched == pytest.approx(touched_slow(config, weights, packed))
    assert result.touched[1] == (config.num_layers - experts.num_dense) * 3


def test_calibration_prices_an_expert_apart() -> None:
    """Passes over one token and over many kinds differ in their experts: the fit tells what one costs."""
    engine = built(f"{MOE},seed=3", "ngram", "f32").engine
    found = calibrate(engine, Grid(num_rows=(1, 4), ks=(0, 1, 3, 7), repeats=3, seconds=10.0))
    experts = found.cost.target.experts
    assert experts is not None
    assert experts.read_s >= 0.0
    per_token = 3 * 4
    assert experts.touched.seconds[0] == pytest.approx(per_token)
    assert np.all(np.diff(experts.touched.seconds) >= 0)
    assert experts.touched.seconds[-1] <= 3 * 16
    assert any(p.touched for p in found.passes)


def test_a_backend_without_experts_says_which_have_them() -> None:
    with pytest.raises(UnsupportedModel, match=r"mixture of experts.*choose --backend native or reference"):
        BACKENDS["cuda"].check_model(tiny_config("mixtral"))
    refused = partial(build, EngineConfig(model=MOE, backend="cuda", device="cpu", draft="off"))
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        refused()
