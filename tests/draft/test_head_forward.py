"""The head's forward pass against the papers' formulas, written out number by number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from paceline.backend.reference.head import fuse, read_out, run_layers
from paceline.model.heads.config import HeadConfig, head_shapes, read_config
from tests.draft.test_head_files import EAGLE_FIRST, EAGLE_SPECULATORS, FIRST, FORMATS, TARGET

if TYPE_CHECKING:
    from collections.abc import Mapping

NUM_TOKENS = 9
CASES = {
    **FORMATS,
    "norm before fc": {**FIRST, "norm_before_fc": True},
    "normed residual": {**FIRST, "norm_before_residual": True},
    "normed heads": {**FIRST, "model_type": "qwen3"},
    "eagle with a bias": {**EAGLE_FIRST, "fusion_bias": True},
    "eagle without a bias": {**EAGLE_SPECULATORS, "fusion_bias": False},
}


def weights_of(config: HeadConfig) -> dict[str, Any]:
    """Random weights; those of the target beside them where the head uses these."""
    random = np.random.default_rng(1)
    shapes = head_shapes(config)
    if config.algorithm.guesses_features:
        width = config.layers.hidden_size
        shapes |= {"head": (config.draft_vocab_size, width), "target_norm": (width,)}
    return {
        name: random.standard_normal(shape) * (0.1 if len(shape) == 2 else 1.0) for name, shape in shapes.items()
    }


# The papers, one token and one number at a time ----------------------------------------------------


def norm(x: Any, weight: Any, eps: float) -> Any:
    return weight * x / math.sqrt(float(x @ x) / len(x) + eps)


def turned(x: Any, position: int, theta: float) -> Any:
    """Dimension i and i + half are turned together, by position / theta ** (2 i / dim)."""
    half, out = len(x) // 2, np.empty_like(x)
    for i in range(half):
        angle = np.float32(position) * np.float32(1 / np.float32(theta ** (2 * i / len(x))))
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def inputs(config: HeadConfig, w: Mapping[str, Any], embedded: Any, tapped: Any) -> list[Any]:
    """What the layers begin with, for every token."""
    eps, rows = config.layers.norm_eps, []
    for token, taps in zip(embedded, tapped, strict=True):
        if config.algorithm.guesses_features:
            first = norm(token, w["embed_norm"], eps) if config.layernorms else token
            fused = w["fc"] @ np.concatenate([first, norm(taps, w["target_norm"], config.target_norm_eps)])
            rows.append(fused + (w["fc_bias"] if config.fusion_bias else 0))
            continue
        parts = np.split(taps, len(config.taps))
        if config.fc_norm:
            parts = [norm(p, w[f"fc_norm.{i}"], eps) for i, p in enumerate(parts)]
        joined = np.concatenate(parts)
        if config.norm_before_fc:
            joined = norm(joined, w["input_norm"], eps)
        rows.append(w["fc"] @ joined)
    return rows


def papers(config: HeadConfig, w: Mapping[str, Any], embedded: Any, tapped: Any) -> tuple[Any, Any]:
    """Return logits and fed-back features of every token."""
    c, eps = config.layers, config.layers.norm_eps
    rows = inputs(config, w, embedded, tapped)
    no_norm = config.algorithm.guesses_features and not config.layernorms
    for layer in range(c.num_layers):
        p = {n.split(".", 2)[2]: v for n, v in w.items() if n.startswith(f"layers.{layer}.")}
        keys, values, out = [], [], []
        for position, row in enumerate(rows):
            if no_norm and layer == 0:
                read, residual = row, row
            elif "hidden_norm" in p:
                normed = norm(row, p["hidden_norm"], eps)
                read = np.concatenate([norm(embedded[position], p["attn_norm"], eps), normed])
                residual = normed if config.norm_before_residual else row
            else:
                read, residual = norm(row, p["attn_norm"], eps), row
            q, k, v = (
                np.split(p[f"attn_{name}"] @ read, len(p[f"attn_{name}"]) // c.head_dim)
                for name in ("q", "k", "v")
            )
            if c.facts.qk_norm:
                q, k = [norm(x, p["attn_q_norm"], eps) for x in q], [norm(x, p["attn_k_norm"], eps) for x in k]
            keys.append([turned(x, position, c.rope.theta) for x in k])
            values.append(v)
            mixed = []
            for head in range(c.num_heads):
                shared = head // (c.num_heads // c.num_kv_heads)
                query = turned(q[head], position, c.rope.theta)
                scores = np.array([query @ key[shared] / math.sqrt(c.head_dim) for key in keys])
                probs = np.exp(scores - scores.max())
                mixed.append(sum(a * v[shared] for a, v in zip(probs / probs.sum(), values, strict=True)))
            hidden = residual + p["attn_o"] @ np.concatenate(mixed)
            normed = norm(hidden, p["mlp_norm"], eps)
            gate = p["mlp_gate"] @ normed
            out.append(hidden + p["mlp_down"] @ (gate / (1 + np.exp(-gate)) * (p["mlp_up"] @ normed)))
        rows = out
    normed_rows = rows if no_norm else [norm(row, w["norm"], eps) for row in rows]
    return np.array([w["head"] @ row for row in normed_rows]), np.array(
        normed_rows if config.norm_output else rows
    )


# Ours --------------------------------------------------------------------------------------------


def causal(config: HeadConfig) -> Any:
    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = config.layers.num_heads // config.layers.num_kv_heads
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        mixed = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return mixed.transpose(0, 1).flatten(1)

    return attend


@pytest.mark.parametrize("name", CASES)
def test_the_forward_pass_is_the_papers(name: str) -> None:
    config = read_config(CASES[name], TARGET)
    weights, random = weights_of(config), np.random.default_rng(2)
    embedded = random.standard_normal((NUM_TOKENS, config.layers.hidden_size))
    tapped = random.standard_normal((NUM_TOKENS, config.tapped_size))
    expected, fed_back = papers(config, weights, embedded, tapped)
    ours = {name: torch.from_numpy(w) for name, w in weights.items()}
    features = fuse(config, ours, torch.from_numpy(tapped))
    positions = torch.arange(NUM_TOKENS)
    hidden = run_layers(config, ours, torch.from_numpy(embedded), features, positions, causal(config))
    logits, next_features = read_out(config, ours, hidden)
    assert np.abs(logits.numpy() - expected).max() < 1e-6 * np.abs(expected).max()
    assert np.abs(next_features.numpy() - fed_back).max() < 1e-6 * np.abs(fed_back).max()


@pytest.mark.parametrize("name", ["speculators", "eagle with a bias", "eagle, speculators"])
def test_every_weight_matters(name: str) -> None:
    """A tensor that could be left out would be one that the forward pass forgot."""
    config = read_config(CASES[name], TARGET)
    weights = {name: torch.from_numpy(w).requires_grad_() for name, w in weights_of(config).items()}
    tapped, embedded = torch.randn(4, config.tapped_size).double(), torch.randn(4, TARGET.hidden_size).double()
    hidden = run_layers(config, weights, embedded, fuse(config, weights, tapped), torch.arange(4), causal(config))
    read_out(config, weights, hidden)[0].square().sum().backward()
    assert all(w.grad is not None and w.grad.abs().max() > 0 for w in weights.values())
