"""All blocks of packed texts in one pass against a block at a time, query by query."""

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
from tests.draft.test_block_files import CORRECTED, FORMATS, PROJECT
from tests.draft.test_head_files import TARGET

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import float64
    from numpy.typing import NDArray

    Array = NDArray[float64]
    Arrays = Mapping[str, Array]

BOUNDS = (TextBounds(0, 1, 7), TextBounds(7, 9, 12), TextBounds(12, 13, 25), TextBounds(25, 26, 28))
TOTAL = 28
CPU = torch.device("cpu")


def normed(x: Array, weight: Array, eps: float) -> Array:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotated(x: Array, position: int, theta: float) -> Array:
    """One head of one token, dimension i paired with i + half."""
    half = len(x) // 2
    angles = position * theta ** (-np.arange(half) / half)
    first, second = x[:half], x[half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    )


def one_block(
    config: HeadConfig, weights: Arrays, embed: Array, taps: Array, text: list[int], anchor: int
) -> list[Array]:
    """Return the logits of each draft behind `anchor`, as if those before it were the text's tokens."""
    block, layers = config.block, config.layers
    assert block is not None
    eps, dim, theta = layers.norm_eps, layers.head_dim, layers.rope.theta
    context = [normed(weights["fc"] @ taps[i], weights["hidden_norm"], eps) for i in range(anchor)]
    states = [embed[text[anchor]]] + [embed[config.mask_token_id or 0]] * (block.size - 1)
    for number in range(layers.num_layers):
        w = {name.split(".", 2)[2]: x for name, x in weights.items() if name.startswith(f"layers.{number}.")}
        inner = [normed(x, w["attn_norm"], eps) for x in states]
        keys, values, queries = [], [], []
        for position, x in enumerate(context + inner):
            heads = (w["attn_k"] @ x).reshape(-1, dim)
            keys.append([rotated(normed(h, w["attn_k_norm"], eps), position, theta) for h in heads])
            values.append((w["attn_v"] @ x).reshape(-1, dim))
        for position, x in enumerate(inner, anchor):
            heads = (w["attn_q"] @ x).reshape(-1, dim)
            queries.append([rotated(normed(h, w["attn_q_norm"], eps), position, theta) for h in heads])
        made = []
        for x, query in zip(states, queries, strict=True):
            mixed = []
            for head, q in enumerate(query):
                kv = head * layers.num_kv_heads // layers.num_heads
                scores = np.array([q @ k[kv] for k in keys]) / np.sqrt(dim)
                shares = np.exp(scores - scores.max())
                mixed.append(sum(s * v[kv] for s, v in zip(shares / shares.sum(), values, strict=True)))
            attended = x + w["attn_o"] @ np.concatenate(mixed)
            y = normed(attended, w["mlp_norm"], eps)
            gate = w["mlp_gate"] @ y
            made.append(attended + w["mlp_down"] @ (gate / (1 + np.exp(-gate)) * (w["mlp_up"] @ y)))
        states = made
    outputs = [normed(x, weights["norm"], eps) for x in states][block.first :]
    logits, state = [], np.zeros(block.rank)
    for number, h in enumerate(outputs[: len(text) - anchor]):
        correction: Array | float = 0.0
        if block.corrector:
            e = weights["corrector.before"][text[anchor + number]]
            x = e
            if block.corrector == "gated":
                x = e / (
                    1
                    + np.exp(
                        -(weights["corrector.gate"] @ np.concatenate([h, e]) + weights["corrector.gate_bias"])
                    )
                )
            if block.corrector == "rnn":
                joint = (
                    weights["corrector.joint"] @ np.concatenate([state, e, h]) + weights["corrector.joint_bias"]
                )
                g, c, o = np.split(joint, 3)
                g = 1 / (1 + np.exp(-g))
                state, x = g * state + (1 - g) * np.tanh(c), np.tanh(o)
            correction = weights["corrector.out"] @ x
        logits.append(weights["head"] @ h + correction)
    return logits


def a_batch(config: HeadConfig, seed: int) -> TrainBatch:
    random = torch.Generator().manual_seed(seed)
    nothing = torch.empty(0)
    return TrainBatch(
        token_ids=torch.randint(0, TARGET.vocab_size, (TOTAL,), generator=random),
        own_ids=torch.empty(0, dtype=torch.int64),
        bounds=BOUNDS,
        tapped=torch.randn(TOTAL, config.tapped_size, generator=random, dtype=torch.float64),
        expected=TargetProbs(nothing, nothing, nothing, nothing),
        rows=nothing,
    )


def random_weights(config: HeadConfig) -> dict[str, Array]:
    random = np.random.default_rng(0)
    shapes = head_shapes(config).items()
    return {
        n: random.normal(float("norm" in n), 0.3, s)
        for n, s in shapes
        if n not in ("confidence", "confidence_bias")
    }


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith("speculators")])
def test_every_draft_is_one_of_a_block_by_itself(name: str, share: float) -> None:
    config = read_config(FORMATS[name], TARGET)
    assert config.block is not None
    weights = random_weights(config)
    batch = a_batch(config, seed=1)
    embed = np.random.default_rng(2).normal(size=(TARGET.vocab_size, config.layers.hidden_size))
    depths = plan_drafts(BOUNDS, config.block.num_drafts, 1.0, 3, CPU, share)
    tensors = {n: torch.from_numpy(w) for n, w in weights.items()}
    made = draft_blocks(config, tensors, torch.from_numpy(embed), batch, depths)
    rows = weights["head"]
    if config.block.corrector:
        rows = np.concatenate([rows, weights["corrector.out"]], 1)
    compared = 0
    for number, (depth, states) in enumerate(zip(depths, made, strict=True)):
        for anchor, state in zip(depth.anchors.tolist(), states.numpy(), strict=True):
            b = next(b for b in BOUNDS if b.start <= anchor < b.end)
            text = batch.token_ids[b.start : b.end].tolist()
            taps = batch.tapped[b.start : b.end].numpy()
            expected = one_block(config, weights, embed, taps, text, anchor - b.start)[number]
            np.testing.assert_allclose(rows @ state, expected, rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared > 15


@pytest.mark.parametrize("values", [PROJECT, {**CORRECTED, "markov_head_type": "rnn"}])
def test_all_that_is_learnt_has_a_gradient(values: dict[str, Any]) -> None:
    config = read_config(values, TARGET)
    assert config.block is not None
    weights = {n: torch.from_numpy(w).requires_grad_() for n, w in random_weights(config).items()}
    batch = a_batch(config, seed=4)
    embed = torch.randn(TARGET.vocab_size, config.layers.hidden_size, dtype=torch.float64)
    depths = plan_drafts(BOUNDS, config.block.num_drafts, 1.0, 0, CPU)
    made = draft_blocks(config, weights, embed, batch, depths)
    rows = weights["head"]
    if config.block.corrector:
        rows = torch.cat([rows, weights["corrector.out"]], 1)
    (made[2] @ rows.T).square().sum().backward()
    assert all(w.grad is not None and w.grad.abs().max() > 0 for w in weights.values())


def test_blocks_begin_at_a_share_of_the_answers_tokens() -> None:
    bounds = (TextBounds(0, 1, 400), TextBounds(400, 500, 900))
    whole, part = (plan_drafts(bounds, 4, 1.0, 5, CPU, share) for share in (1.0, 0.25))
    assert 0.2 < len(part[0].anchors) / len(whole[0].anchors) < 0.3
    assert set(part[0].anchors.tolist()) < set(whole[0].anchors.tolist())
    assert len(part[3].anchors) >= len(part[0].anchors) - 6  # only the end of a text cuts a block
    assert len(plan_drafts(bounds, 4, 1.0, 5, CPU, 1e-9)[0].anchors) == 1
