"""The choice kernels against the compiled choice of one row, in Triton's interpreter. Run by `test_choice.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.backend.cuda.choice import _best_variant, choice_specs, choose
from paceline.backend.cuda.kernel_launch import interpreted, launch
from paceline.core.nouns import BROKEN
from tests.backend.cuda.choices import broken_rows, expected, random_choices
from tests.backend.cuda.interpreted import poison

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreted()
    poison(monkeypatch)


@pytest.mark.parametrize(("vocab", "hinted"), [(1, True), (320, False), (1024, True), (2100, True)])
def test_token_ids_and_margins_are_those_of_single_rows(vocab: int, hinted: bool) -> None:
    case = random_choices(vocab, vocab, torch.float32, hinted=hinted, num_places=16)
    token_ids, margins = choose(case.logits, choice_specs(case.specs, CPU), **case.hints)
    want_ids, want_margins = expected(case)
    assert token_ids.tolist() == want_ids
    np.testing.assert_allclose(margins.numpy(), want_margins, rtol=1e-9, atol=1e-11)


def test_more_tiles_than_are_compared_at_once() -> None:
    """Two best of each tile, in any order, with many ties: the lowest id of the best, and the next."""
    chance = np.random.default_rng(0)
    two = np.sort(chance.integers(0, 9, (6, 300, 2)).astype(np.float64))
    ids = chance.permuted(np.tile(np.arange(300, dtype=np.int32), (6, 1)), axis=1)
    best, second = torch.from_numpy(two[..., 1].copy()), torch.from_numpy(two[..., 0].copy())
    temperature, token_ids = torch.full((6,), 0.5, dtype=torch.float64), torch.empty(6, dtype=torch.int64)
    margins = torch.empty(6, dtype=torch.float64)
    of_tiles = best, second, torch.from_numpy(ids)
    launch(_best_variant("fp64"), (6,), *of_tiles, temperature, token_ids, margins, 300)
    for row in range(6):
        top = two[row].max()
        assert token_ids[row] == ids[row][two[row, :, 1] == top].min()
        assert margins[row] == 0.5 * (top - np.sort(two[row].ravel())[-2])


def test_a_row_without_finite_logits_is_broken_and_nan_is_never_chosen() -> None:
    case = broken_rows(torch.float32)
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
    want_ids, want_margins = choose(full.double(), specs, **case.hints)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(margins, want_margins, rtol=1e-5, atol=1e-5)


def test_the_noises_tails_are_resolved() -> None:
    """The largest of thirty thousand is far in the tail where log(1 - v) loses half of its digits."""
    case = random_choices(2, 30_000, torch.float32, num_places=2, temperatures=(1.5,))
    token_ids, margins = choose(case.logits * 0, choice_specs(case.specs, CPU))
    want_ids, want_margins = expected(type(case)(case.logits * 0, case.specs))
    assert token_ids.tolist() == want_ids
    np.testing.assert_allclose(margins.numpy(), want_margins, rtol=1e-12, atol=1e-13)
