"""Training-time test against drafting token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.draft.heads.config import HeadConfig, read_config
from paceline.draft.heads.forward import fuse, read_out, run_layers
from paceline.train.unroll import unroll
from tests.draft.test_head_files import SPECULATORS, TARGET
from tests.draft.test_head_forward import CASES, causal, weights_of

if TYPE_CHECKING:
    from collections.abc import Mapping

LENGTHS = (7, 5, 8)  # of the texts in a pack
NUM_STEPS = 4


def one_draft(
    config: HeadConfig, weights: Mapping[str, Any], embedded: Any, features: Any, first: int, step: int
) -> Any:
    """Return the logits of the guess after entry `first + step` of one text, whose draft begins behind `first`."""
    rows = [features[i - 1] for i in range(1, first + 1)]
    for drafted in range(step + 1):
        tokens = embedded[1 : first + drafted + 1]
        positions = torch.arange(1, first + drafted + 1)
        hidden = run_layers(config, weights, tokens, torch.stack(rows), positions, causal(config))
        logits, fed_back = read_out(config, weights, hidden)
        rows.append(fed_back[-1])
    return logits[-1]


@pytest.mark.parametrize("name", [n for n in CASES if n != "peagle"])
def test_every_step_is_a_draft_token_by_token(name: str) -> None:
    config = read_config(CASES[name], TARGET)
    weights = {n: torch.from_numpy(w) for n, w in weights_of(config).items()}
    torch.manual_seed(0)
    total = sum(LENGTHS)
    embedded = torch.randn(total, config.layers.hidden_size, dtype=torch.float64)
    tapped = torch.randn(total, config.tapped_size, dtype=torch.float64)
    begins = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    starts = torch.tensor([b for b, length in zip(begins, LENGTHS, strict=True) for _ in range(length)])
    steps = unroll(config, weights, embedded, tapped, starts, NUM_STEPS)
    features = fuse(config, weights, tapped)
    checked = 0
    for begin, length in zip(begins, LENGTHS, strict=True):
        text = slice(begin, begin + length)
        for step in range(NUM_STEPS):
            for place in range(length):
                valid = bool(steps[step].valid[begin + place])
                assert valid == (place - step >= 1)
                if valid:
                    expected = one_draft(config, weights, embedded[text], features[text], place - step, step)
                    assert torch.allclose(steps[step].logits[begin + place], expected, rtol=1e-6, atol=1e-6)
                    checked += 1
    assert checked == sum(max(0, length - 1 - s) for length in LENGTHS for s in range(NUM_STEPS))


def test_everything_is_finite_and_has_a_gradient() -> None:
    config = read_config(SPECULATORS, TARGET)
    weights = {n: torch.from_numpy(w).float().requires_grad_() for n, w in weights_of(config).items()}
    embedded, tapped = torch.randn(6, TARGET.hidden_size), torch.randn(6, config.tapped_size)
    steps = unroll(config, weights, embedded, tapped, torch.tensor([0, 0, 2, 2, 2, 2]), 3)
    assert all(s.logits.isfinite().all() for s in steps)
    torch.stack([s.logits[s.valid].square().sum() for s in steps]).sum().backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in weights.values())
