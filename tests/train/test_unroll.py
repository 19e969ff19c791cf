"""Training-time test against drafting token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.backend.reference.head import fuse, read_out, run_layers
from paceline.model.heads.config import HeadConfig, read_config
from paceline.train.drafts import TextBounds, plan_drafts
from paceline.train.unroll import unroll
from tests.draft.test_head_files import SPECULATORS, TARGET
from tests.draft.test_head_forward import CASES, causal, weights_of

if TYPE_CHECKING:
    from collections.abc import Mapping

BOUNDS = (TextBounds(0, 1, 7), TextBounds(7, 9, 12), TextBounds(12, 13, 21), TextBounds(21, 22, 24))
TOTAL, NUM_STEPS = 24, 4
CPU = torch.device("cpu")


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


@pytest.mark.parametrize("keep", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("name", [n for n in CASES if n != "peagle"])
def test_every_guess_is_a_draft_token_by_token(name: str, keep: float) -> None:
    config = read_config(CASES[name], TARGET)
    weights = {n: torch.from_numpy(w) for n, w in weights_of(config).items()}
    torch.manual_seed(0)
    embedded = torch.randn(TOTAL, config.layers.hidden_size, dtype=torch.float64)
    tapped = torch.randn(TOTAL, config.tapped_size, dtype=torch.float64)
    depths = plan_drafts(BOUNDS, NUM_STEPS, keep, 0, CPU)
    guesses = unroll(config, weights, embedded, tapped, BOUNDS, depths)
    features = fuse(config, weights, tapped)
    for step, depth in enumerate(depths):
        for anchor, guess in zip(depth.anchors.tolist(), guesses[step], strict=True):
            b = next(b for b in BOUNDS if b.start <= anchor < b.end)
            text = slice(b.start, b.end)
            expected = one_draft(config, weights, embedded[text], features[text], anchor - b.start, step)
            assert torch.allclose(weights["head"] @ guess, expected, rtol=1e-6, atol=1e-6)


def test_drafts_begin_in_answers_and_end_with_texts() -> None:
    depths = plan_drafts(BOUNDS, NUM_STEPS, 1.0, 0, CPU)
    for step, depth in enumerate(depths):
        expected = [a for b in BOUNDS for a in range(b.answer, b.end - 1) if a + step <= b.end - 2]
        assert depth.anchors.tolist() == expected
    assert [len(d.anchors) for d in depths] == [5 + 2 + 7 + 1, 4 + 1 + 6, 3 + 5, 2 + 4]


def test_a_draft_that_goes_on_was_at_every_depth_before() -> None:
    depths = plan_drafts((TextBounds(0, 1, 400),), NUM_STEPS, 0.5, 3, CPU)
    entries: list[tuple[int, int]] = []
    for step, (before, depth) in enumerate(pairwise(depths), 1):
        assert torch.equal(before.anchors[depth.kept], depth.anchors)
        assert 0.4 < len(depth.anchors) / len(before.anchors) < 0.6
        entries += [(anchor, step) for anchor in depth.anchors.tolist()]
        for anchor, own in zip(depth.anchors.tolist(), depth.own.tolist(), strict=True):
            assert [entries[i] for i in own] == [(anchor, s) for s in range(1, step + 1)]
    assert torch.equal(
        depths[-1].anchors, plan_drafts((TextBounds(0, 1, 400),), NUM_STEPS, 0.5, 3, CPU)[-1].anchors
    )


def test_everything_is_finite_and_has_a_gradient() -> None:
    config = read_config(SPECULATORS, TARGET)
    weights = {n: torch.from_numpy(w).float().requires_grad_() for n, w in weights_of(config).items()}
    bounds = (TextBounds(0, 1, 3), TextBounds(3, 5, 10))
    embedded, tapped = torch.randn(10, TARGET.hidden_size), torch.randn(10, config.tapped_size)
    guesses = unroll(config, weights, embedded, tapped, bounds, plan_drafts(bounds, 3, 1.0, 0, CPU))
    logits = [g @ weights["head"].T for g in guesses]
    assert all(x.isfinite().all() for x in logits)
    torch.stack([x.square().sum() for x in logits]).sum().backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in weights.values())
