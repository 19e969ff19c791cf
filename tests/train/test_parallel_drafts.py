"""All depths in one pass against a draft at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.backend.reference.head import fuse, read_out, run_layers
from paceline.model.heads.config import HeadConfig, read_config
from paceline.train.drafts import plan_drafts
from paceline.train.parallel_drafts import draft_in_parallel
from tests.draft.test_head_files import PEAGLE, TARGET
from tests.draft.test_head_forward import causal, weights_of
from tests.train.test_unroll import BOUNDS, CPU, NUM_STEPS, TOTAL

if TYPE_CHECKING:
    from collections.abc import Mapping


def one_draft(
    config: HeadConfig, weights: Mapping[str, Any], embedded: Any, mask: Any, features: Any, first: int
) -> Any:
    """Return the logits of all guesses of one draft, as at inference: true entries up to `first`, then masks."""
    unknown = fuse(config, weights, weights["mask_hidden"][None])
    tokens = torch.cat([embedded[1 : first + 1], mask.expand(NUM_STEPS - 1, -1)])
    rows = torch.cat([features[:first], unknown.expand(NUM_STEPS - 1, -1)])
    positions = torch.arange(1, first + NUM_STEPS)
    hidden = run_layers(config, weights, tokens, rows, positions, causal(config))
    logits, _ = read_out(config, weights, hidden)
    return logits[first - 1 :]


@pytest.mark.parametrize("keep", [1.0, 0.6])
def test_every_guess_is_one_of_a_draft_by_itself(keep: float) -> None:
    config = read_config(PEAGLE, TARGET)
    weights = {n: torch.from_numpy(w) for n, w in weights_of(config).items()}
    torch.manual_seed(0)
    embedded = torch.randn(TOTAL, config.layers.hidden_size, dtype=torch.float64)
    mask = torch.randn(config.layers.hidden_size, dtype=torch.float64)
    tapped = torch.randn(TOTAL, config.tapped_size, dtype=torch.float64)
    depths = plan_drafts(BOUNDS, NUM_STEPS, keep, 0, CPU)
    guesses = draft_in_parallel(config, weights, embedded, mask, tapped, BOUNDS, depths)
    features = fuse(config, weights, tapped)
    for step, depth in enumerate(depths):
        for anchor, guess in zip(depth.anchors.tolist(), guesses[step], strict=True):
            b = next(b for b in BOUNDS if b.start <= anchor < b.end)
            text = slice(b.start, b.end)
            expected = one_draft(config, weights, embedded[text], mask, features[text], anchor - b.start)[step]
            assert torch.allclose(weights["head"] @ guess, expected, rtol=1e-6, atol=1e-6)


def test_all_that_is_learnt_has_a_gradient() -> None:
    config = read_config(PEAGLE, TARGET)
    weights = {n: torch.from_numpy(w).requires_grad_() for n, w in weights_of(config).items()}
    embedded = torch.randn(TOTAL, config.layers.hidden_size).double()
    tapped = torch.randn(TOTAL, config.tapped_size).double()
    depths = plan_drafts(BOUNDS, NUM_STEPS, 1.0, 0, CPU)
    guesses = draft_in_parallel(config, weights, embedded, embedded[0], tapped, BOUNDS, depths)
    (guesses[2] @ weights["head"].T).square().sum().backward()
    assert all(w.grad is not None and w.grad.abs().max() > 0 for w in weights.values())
