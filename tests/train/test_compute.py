"""Which numbers matrices are multiplied in, and what stays float32 whatever they are."""

from __future__ import annotations

import pytest
import torch

from paceline.model.heads.config import read_config
from paceline.train.compute import COMPUTES, choose_compute, product_precision
from paceline.train.drafts import plan_drafts
from paceline.train.parallel_drafts import draft_in_parallel
from paceline.train.unroll import unroll
from tests.draft.test_head_files import PEAGLE, SPECULATORS, TARGET
from tests.draft.test_head_forward import weights_of
from tests.train.test_unroll import BOUNDS, CPU, NUM_STEPS, TOTAL


@pytest.mark.parametrize(
    ("tiles", "vectors", "name", "why"),
    [
        (True, True, "bfloat16", "the processor has AMX"),
        (False, True, "bfloat16", "the processor has AVX-512 BF16"),
        (False, False, "float32", "the processor has no instructions for bfloat16"),
    ],
)
def test_a_processor_with_instructions_for_it_multiplies_in_bfloat16(
    tiles: bool, vectors: bool, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: vectors, raising=False)
    assert choose_compute("auto", CPU) == (name, why)
    assert [choose_compute(name, CPU)[0] for name in COMPUTES] == list(COMPUTES)


def test_what_cannot_be_told_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    assert choose_compute("auto", CPU)[0] == "float32"
    assert choose_compute("auto", torch.device("meta"))[0] == "float32"


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_guesses_and_gradients_stay_near_those_of_float32(kind: str) -> None:
    """A rounded factor is off by at most 1/256; a few products one after another by not much more."""
    config = read_config({"eagle3": SPECULATORS, "peagle": PEAGLE}[kind], TARGET)
    random = torch.Generator().manual_seed(0)
    tapped = torch.randn(TOTAL, config.tapped_size, generator=random)
    embedded = torch.randn(TOTAL, config.layers.hidden_size, generator=random)
    depths = plan_drafts(BOUNDS, NUM_STEPS, 1.0, 0, CPU)
    guesses, gradients = {}, {}
    for name in COMPUTES:
        weights = {n: torch.from_numpy(w).float().requires_grad_() for n, w in weights_of(config).items()}
        with product_precision(name):
            if kind == "eagle3":
                made = unroll(config, weights, embedded, tapped, BOUNDS, depths)
            else:
                made = draft_in_parallel(config, weights, embedded, embedded[0], tapped, BOUNDS, depths)
        guesses[name] = torch.cat(made)
        guesses[name].square().mul(torch.linspace(0, 1, guesses[name].shape[1])).sum().backward()
        gradients[name] = {n: w.grad for n, w in weights.items() if w.grad is not None}
    exact, near = guesses["float32"].detach(), guesses["bfloat16"].detach()
    assert near.dtype == torch.float32
    assert 0 < float((near - exact).norm() / exact.norm()) < 0.02
    for name, gradient in gradients["float32"].items():
        ours = gradients["bfloat16"][name]
        assert ours.dtype == torch.float32
        assert float((ours - gradient).norm()) <= 0.05 * float(gradient.norm()) + 1e-6, name


def test_products_of_batches_are_rounded_where_they_ask_for_it() -> None:
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(3, 40, 40, generator=random, requires_grad=True) for _ in range(2))
    exact = left @ right
    with product_precision("bfloat16"):
        near, untouched = torch.matmul(left, right), left @ right
    assert torch.equal(untouched, exact)
    assert near.dtype == torch.float32
    assert 0 < float((near - exact).detach().norm() / exact.detach().norm()) < 0.01
    near.square().sum().backward()
    assert left.grad is not None
    assert left.grad.dtype == torch.float32
