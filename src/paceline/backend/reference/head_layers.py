"""A draft head's forward pass in PyTorch: the readable twin of faster ones, and what training differentiates.

EAGLE-3 (arXiv 2503.01840): hidden states of several depths are fused to one feature, `fc`. The first layer reads
that feature beside the embedding of the token that came after it, and so guesses the token after that. Its output,
before the last norm, stands for the next feature. P-EAGLE (arXiv 2602.01469) instead puts a learned
feature and a mask token at the positions that are not known yet, and guesses all of them in one pass.

EAGLE-1 (arXiv 2401.15077): the feature is what the target's own head reads, and so is the layer's output. `fc`
fuses feature and embedding to the input of a layer that norms nothing before its attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paceline.backend.reference.attention import cos_sin, rotate
from paceline.backend.reference.decoder import ACTIVATIONS, linear, rms_norm
from paceline.backend.rope import inverse_frequencies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.model.heads.config import HeadConfig

    # (layer, queries [n, heads, dim], keys and values [n, kv_heads, dim]) -> [n, heads * dim]
    Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    Weights = Mapping[str, torch.Tensor]


def fuse(config: HeadConfig, weights: Weights, tapped: torch.Tensor) -> torch.Tensor:
    """Return the feature [n, width] of each token from its taps, one after another [n, tapped_size]."""
    eps = config.layers.norm_eps
    if config.algorithm.guesses_features:
        return rms_norm(tapped, weights["target_norm"], config.target_norm_eps)
    if config.norm_before_fc:
        tapped = rms_norm(tapped, weights["input_norm"], eps)
    if config.fc_norm:
        parts = torch.split(tapped, config.target_hidden_size, dim=-1)
        normed = [rms_norm(part, weights[f"fc_norm.{i}"], eps) for i, part in enumerate(parts)]
        tapped = torch.cat(normed, dim=-1)
    return functional.linear(tapped, weights["fc"])


def run_layers(
    config: HeadConfig,
    weights: Weights,
    embedded: torch.Tensor,
    features: torch.Tensor,
    positions: torch.Tensor,
    attend: Attend,
) -> torch.Tensor:
    """Return the output [n, width] of the head's layers, before the last norm.

    embedded: [n, width] of the tokens. features: [n, width] of the tokens before them. positions: [n] int64.
    """
    inverse = torch.from_numpy(inverse_frequencies(config.layers.rope, config.layers.head_dim)).to(embedded.device)
    cos, sin = cos_sin(positions, inverse, embedded.dtype)
    eps = config.layers.norm_eps
    hidden = features
    if config.algorithm.guesses_features:
        embedded = _norm(weights, "embed_norm", embedded, eps)
        hidden = linear(weights, "fc", torch.cat([embedded, features], dim=-1))
    for index in range(config.layers.num_layers):
        layer = {n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"layers.{index}.")}
        if "hidden_norm" in layer:
            normed = rms_norm(hidden, layer["hidden_norm"], eps)
            hidden = normed if config.norm_before_residual else hidden
            read = torch.cat([rms_norm(embedded, layer["attn_norm"], eps), normed], dim=-1)
        else:
            read = _norm(layer, "attn_norm", hidden, eps)
        query, key, value = (
            torch.unflatten(linear(layer, f"attn_{name}", read), -1, (-1, config.layers.head_dim))
            for name in "qkv"
        )
        if config.layers.facts.qk_norm:
            query, key = rms_norm(query, layer["attn_q_norm"], eps), rms_norm(key, layer["attn_k_norm"], eps)
        mixed = attend(index, rotate(query, cos, sin), rotate(key, cos, sin), value)
        hidden = hidden + linear(layer, "attn_o", mixed)
        normed = rms_norm(hidden, layer["mlp_norm"], eps)
        gate = ACTIVATIONS[config.layers.facts.activation](linear(layer, "mlp_gate", normed))
        hidden = hidden + linear(layer, "mlp_down", gate * linear(layer, "mlp_up", normed))
    return hidden


def last_norm(config: HeadConfig, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Return what the vocabulary is multiplied with, [n, width]."""
    return _norm(weights, "norm", hidden, config.layers.norm_eps)


def read_out(config: HeadConfig, weights: Weights, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [n, draft_vocab_size] and what stands for the next positions' features [n, width]."""
    normed = last_norm(config, weights, hidden)
    return functional.linear(normed, weights["head"]), normed if config.norm_output else hidden


def relay(
    config: HeadConfig,
    weights: Weights,
    first: torch.Tensor,
    normed: torch.Tensor,
    known: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return what guesses tell those after them, [n, relay_size], between -1 and 1.

    A head that guesses all tokens at once does not know at one place what it guesses at the one before. This
    recurrence over the places tells it, once the layers have been run (recurrent drafters: ReDrafter, arXiv
    2403.09919; heads that see the guesses before: Hydra, arXiv 2402.05109). What a guess is told is added, as
    `relayed`, to what the vocabulary is multiplied with.

    first, normed: [n, width] of the rows' first places and of these guesses' own, as `last_norm` returns them.
    known: the embeddings [n, width] of the guesses before, and what was told to these [n, relay_size]; None for
    first guesses.
    """
    both = functional.linear(torch.cat([first, normed], dim=-1), weights["relay.place"])
    if known is not None:
        before = rms_norm(known[0], weights["relay.embed_norm"], config.layers.norm_eps)
        both = both + functional.linear(torch.cat([before, known[1]], dim=-1), weights["relay.known"])
    gate, value = both.chunk(2, dim=-1)
    return torch.tanh(functional.linear(functional.silu(gate) * value, weights["relay.tell"]))


def relayed(weights: Weights, told: torch.Tensor) -> torch.Tensor:
    """Return what is added to what the vocabulary is multiplied with, [n, width], for what guesses were told."""
    return functional.linear(told, weights["relay.out"])


def _norm(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm where the head has that norm."""
    return rms_norm(x, weights[name], eps) if name in weights else x
