"""Mixture of experts of the `reference` backend: the definition of what the native kernels compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paceline.model.experts import expert_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.model.experts import Experts


_TINY = 1e-20  # keeps the sum of sigmoids above 0


def route(
    experts: Experts, logits: torch.Tensor, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts, best first, and their weights. logits: [num_tokens, num_experts].

    Equal logits go by the expert's number. Both are [num_tokens, per_token].
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if experts.sigmoid:
        return _route_by_sigmoid(experts, wide, correction, logits.dtype)
    chosen = wide.argsort(dim=-1, descending=True, stable=True)[:, : experts.per_token]
    weights = wide.gather(-1, chosen).softmax(-1) if experts.normed else wide.softmax(-1).gather(-1, chosen)
    return chosen, (weights * experts.scale).to(logits.dtype)


def _route_by_sigmoid(
    experts: Experts, logits: torch.Tensor, correction: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh experts by sigmoids; a correction changes who is chosen (arXiv 2408.15664)."""
    scores = torch.sigmoid(logits)
    corrected = scores if correction is None else scores + correction
    chosen = corrected.argsort(dim=-1, descending=True, stable=True)[:, : experts.per_token]
    weights = scores.gather(-1, chosen)
    if experts.normed:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return chosen, (weights * experts.scale).to(dtype)


def mix(
    experts: Experts,
    layer: Mapping[str, torch.Tensor],
    normed: torch.Tensor,
    network: Callable[[Mapping[str, torch.Tensor], str, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of what each token's experts compute. [num_tokens, hidden] in and out.

    network: computes the gated feed-forward network whose matrices begin with a prefix.
    """
    logits = functional.linear(normed, layer["router"], layer.get("router_bias"))
    chosen, weights = route(experts, logits, layer.get("router_correction"))
    parts = normed.new_zeros(*chosen.shape, normed.shape[-1])
    for index in sorted({*chosen.flatten().tolist()}):
        tokens, places = (chosen == index).nonzero(as_tuple=True)
        parts[tokens, places] = network(layer, expert_name(index, ""), normed[tokens])
    mixed = (parts * weights[..., None]).sum(1)
    if not experts.shared_size:
        return mixed
    shared = network(layer, "mlp_", normed)
    if not experts.shared_gate:
        return mixed + shared
    return mixed + torch.sigmoid(functional.linear(normed, layer["shared_gate"])) * shared
