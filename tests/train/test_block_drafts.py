"""All blocks of packed texts in one pass against a block at a time, by the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from paceline.model.heads.config import HeadConfig, head_shapes, read_config
from paceline.train.batch import TrainBatch
from paceline.train.block_drafts import draft_blocks
from paceline.train.drafts import TextBounds, plan_drafts
from paceline.train.loss import TargetProbs
from tests.draft.test_block_files import CORRECTED, FORMATS, PROJECT, block_file_name
from tests.draft.test_head_files import TARGET
from tests.oracles.block_head import draft_block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float64
    from numpy.typing import NDArray

PROMPTS = (2, 6, 1, 11)  # tokens before the drafts of each text
CPU = torch.device("cpu")


def a_batch(config: HeadConfig, token_ids: Sequence[int], bounds: tuple[TextBounds, ...]) -> TrainBatch:
    nothing = torch.empty(0)
    random = torch.Generator().manual_seed(len(token_ids))
    return TrainBatch(
        token_ids=torch.tensor(token_ids),
        own_ids=torch.empty(0, dtype=torch.int64),
        bounds=bounds,
        tapped=torch.randn(len(token_ids), config.tapped_size, generator=random, dtype=torch.float64),
        expected=TargetProbs(nothing, nothing, nothing, nothing),
        rows=nothing,
    )


def random_weights(config: HeadConfig) -> dict[str, NDArray[float64]]:
    random = np.random.default_rng(0)
    return {name: random.normal(float("norm" in name), 0.3, s) for name, s in head_shapes(config).items()}


def logits_of(config: HeadConfig, weights: Mapping[str, torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    if config.block is not None and config.block.rank:
        return states @ torch.cat([weights["head"], weights["corrector.out"]], 1).T
    return states @ weights["head"].T


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith("speculators")])
def test_every_draft_is_one_of_a_block_by_itself(name: str, share: float) -> None:
    """The oracle drafts greedily; with its drafts as the answer, training computes the same logits."""
    config = read_config(FORMATS[name], TARGET)
    assert config.block is not None
    weights = random_weights(config)
    embed = np.random.default_rng(2).normal(size=(TARGET.vocab_size, config.layers.hidden_size))
    files = {block_file_name(n): w for n, w in weights.items()}
    files["d2t"] = np.arange(config.draft_vocab_size) % 5
    drafts, size = config.block.num_drafts, TARGET.hidden_size
    starts = np.cumsum([0, *(n + drafts for n in PROMPTS)])
    bounds = tuple(TextBounds(s, s + n - 1, e) for n, s, e in zip(PROMPTS, starts, starts[1:], strict=False))
    token_ids = np.random.default_rng(3).integers(0, TARGET.vocab_size, starts[-1])
    batch = a_batch(config, token_ids.tolist(), bounds)
    expected = []
    for b in bounds:
        known = batch.tapped[b.start : b.answer].numpy().reshape(-1, len(config.taps), size)
        taps = {tap: known[:, number] for number, tap in enumerate(config.taps)}
        text = batch.token_ids[b.start : b.answer + 1].tolist()
        drafted = draft_block(FORMATS[name], files, embed, embed, text, taps)
        batch.token_ids[b.answer + 1 : b.end] = torch.tensor(drafted.token_ids)
        expected.append(drafted.logits)
    depths = plan_drafts(bounds, drafts, 1.0, 3, CPU, share)
    tensors = {n: torch.from_numpy(w) for n, w in weights.items()}
    made = draft_blocks(config, tensors, torch.from_numpy(embed), batch, depths)
    compared = 0
    for number, (depth, states) in enumerate(zip(depths, made, strict=True)):
        for anchor, logits in zip(depth.anchors.tolist(), logits_of(config, tensors, states), strict=True):
            for b, rows in zip(bounds, expected, strict=True):
                if anchor == b.answer:
                    np.testing.assert_allclose(logits.numpy(), rows[number], rtol=1e-4, atol=1e-4)
                    compared += 1
    assert compared == drafts * len(bounds) if share == 1.0 else 0 < compared < drafts * len(bounds)


@pytest.mark.parametrize("values", [PROJECT, {**CORRECTED, "markov_head_type": "rnn"}])
def test_all_that_is_learnt_has_a_gradient(values: dict[str, Any]) -> None:
    config = read_config(values, TARGET)
    assert config.block is not None
    weights = {n: torch.from_numpy(w).requires_grad_() for n, w in random_weights(config).items()}
    batch = a_batch(config, [5, 9] * 14, (TextBounds(0, 1, 7), TextBounds(7, 9, 28)))
    embed = torch.randn(TARGET.vocab_size, config.layers.hidden_size, dtype=torch.float64)
    depths = plan_drafts(batch.bounds, config.block.num_drafts, 1.0, 0, CPU)
    made = draft_blocks(config, weights, embed, batch, depths)
    logits_of(config, weights, made[2]).square().sum().backward()
    learnt = [w for n, w in weights.items() if not n.startswith("confidence")]
    assert all(w.grad is not None and w.grad.abs().max() > 0 for w in learnt)


def test_blocks_begin_at_a_share_of_the_answers_tokens() -> None:
    bounds = (TextBounds(0, 1, 400), TextBounds(400, 500, 900))
    whole, part = (plan_drafts(bounds, 4, 1.0, 5, CPU, share) for share in (1.0, 0.25))
    assert 0.2 < len(part[0].anchors) / len(whole[0].anchors) < 0.3
    assert set(part[0].anchors.tolist()) < set(whole[0].anchors.tolist())
    assert len(part[3].anchors) >= len(part[0].anchors) - 6  # only the end of a text cuts a block
    assert len(plan_drafts(bounds, 4, 1.0, 5, CPU, 1e-9)[0].anchors) == 1
