"""Choices of many places at once against the compiled choice of one row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.backend.cuda.choice import choice_specs, choose
from paceline.core.nouns import BROKEN
from tests.backend.cuda.choices import broken_rows, expected, random_choices
from tests.backend.cuda.interpreter import run_interpreted

CPU = torch.device("cpu")


@settings(max_examples=60)
@given(st.integers(0, 1000), st.sampled_from((1, 2, 63, 320, 5000)), st.booleans(), st.booleans())
def test_token_ids_and_margins_are_those_of_single_rows(seed: int, vocab: int, exact: bool, hinted: bool) -> None:
    case = random_choices(seed, vocab, torch.float64 if exact else torch.float32, hinted=hinted)
    token_ids, margins = choose(case.logits, choice_specs(case.specs, CPU), **case.hints)
    want_ids, want_margins = expected(case)
    assert token_ids.tolist() == want_ids
    np.testing.assert_allclose(margins.numpy(), want_margins, rtol=1e-9, atol=1e-12)


def test_a_whole_vocabulary_is_chosen_from_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_choices(7, 49152, torch.float32, hinted=True, num_places=12)
    monkeypatch.setattr("paceline.backend.cuda.choice.MAX_SCORED", 5 * 49152)
    token_ids, _ = choose(case.logits, choice_specs(case.specs, CPU), **case.hints)
    assert token_ids.tolist() == expected(case)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_without_finite_logits_is_broken_and_nan_is_never_chosen(dtype: torch.dtype) -> None:
    case = broken_rows(dtype)
    token_ids, margins = choose(case.logits, choice_specs(case.specs, CPU))
    want_ids, want_margins = expected(case)
    assert token_ids.tolist() == want_ids
    assert want_ids.count(BROKEN) == 6
    np.testing.assert_allclose(margins.numpy(), want_margins, rtol=1e-9)


def test_a_draft_vocabulary_draws_with_the_noise_of_the_targets_ids() -> None:
    case = random_choices(3, 200, torch.float32, hinted=True, num_places=30)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:90]
    full = torch.full_like(case.logits, -torch.inf)
    full[:, order] = case.logits[:, order]
    draft_ids = torch.cat([order, torch.tensor([-1, -1])])
    reduced = torch.cat([case.logits[:, order], torch.full((30, 2), 1e9)], 1)
    specs = choice_specs(case.specs, CPU)
    ids, margins = choose(reduced, specs, draft_ids=draft_ids, **case.hints)
    want_ids, want_margins = choose(full, specs, **case.hints)
    assert torch.equal(ids, want_ids)
    assert torch.equal(margins, want_margins)


def test_temperatures_may_be_float32() -> None:
    case = random_choices(5, 320, torch.float32, temperatures=(0.0, 0.5, 1.0, 2.0))
    specs = choice_specs(case.specs, CPU)
    single = type(specs)(specs.seed_lo, specs.seed_hi, specs.choice, specs.position, specs.temperature.float())
    assert torch.equal(choose(case.logits, single)[0], choose(case.logits, specs)[0])


def test_a_choice_needs_no_number_from_the_device() -> None:
    case = random_choices(5, 320, torch.float32, hinted=True)
    specs = choice_specs(case.specs, CPU)
    with FakeTensorMode() as mode:
        fake = type(specs)(*(mode.from_tensor(getattr(specs, name)) for name in specs.__slots__))
        hints = {name: mode.from_tensor(value) for name, value in case.hints.items()}
        token_ids, margins = choose(mode.from_tensor(case.logits), fake, **hints)
    assert token_ids.shape == margins.shape == (len(case.specs),)


def test_kernels_do_the_same_in_the_interpreter() -> None:
    run_interpreted("interpreted_choice.py")
