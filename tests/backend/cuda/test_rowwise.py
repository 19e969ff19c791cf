"""Operations over a token's row by PyTorch's operations, which say what the reference says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.backend.cuda import kernel_launch
from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.kernel_launch import begin_early, launch, variant_table
from paceline.backend.cuda.products import FP8, Parts, finished
from paceline.backend.cuda.rowwise import add_norm, embed, gated, rms_norm, write_qkv
from paceline.backend.reference import decoder as reference
from paceline.backend.reference.attention import cos_sin, rotate
from tests.backend.cuda.interpreter import run_interpreted

EPS = 1e-6
every_type = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def device_pass(positions: list[int], slots: list[int]) -> DevicePass:
    zeros = torch.zeros(1, dtype=torch.int64)
    return DevicePass(zeros, torch.tensor(positions), torch.tensor(slots), zeros, zeros[None], zeros)


def layer(slots: int, heads: int, dim: int, dtype: torch.dtype) -> Any:
    scales = torch.zeros(2, slots, heads) if dtype == FP8 else None
    return SimpleNamespace(data=torch.zeros(2, slots, heads, dim).to(dtype), scales=scales)


def test_kernels_in_the_interpreter():
    run_interpreted("interpreted_rowwise.py")


def test_kernels_begin_early_only_if_told(monkeypatch):
    calls = []
    monkeypatch.setattr(kernel_launch, "_kernel", lambda path: {(3,): lambda *_, **named: calls.append(named)})
    variants = [
        next(v for v in variant_table().values() if v.kernel.endswith(n)) for n in ("norm_rows", "plan_work")
    ]
    for yes in (True, False):
        begin_early(yes=yes)
        for variant in variants:
            launch(variant, (3,))
    assert [(c.get("PDL"), "launch_pdl" in c) for c in calls] == [
        (True, True),
        (None, False),
        (False, False),
        (None, False),
    ]


@every_type
def test_embeddings_and_their_scale(dtype):
    table, ids = randn(40, 24, dtype=dtype), torch.tensor([3, 39, 3])
    for scale in (1.0, 24**0.5, 3.3):
        rounded = torch.tensor(scale, dtype=torch.float32).to(dtype)
        assert torch.equal(embed(ids, table, scale), table[ids] * rounded)


@every_type
def test_norms(dtype):
    x, weight = randn(3, 2, 24, dtype=dtype), randn(24, dtype=dtype)
    assert torch.equal(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@every_type
def test_a_product_is_added_to_the_residual_stream(dtype):
    residual, added = randn(3, 24, dtype=dtype), randn(3, 24, dtype=dtype, seed=1)
    weight, post_weight = randn(24, dtype=dtype, seed=2), randn(24, dtype=dtype, seed=3)
    plain = add_norm(added, residual, None, EPS)
    assert torch.equal(plain[0], residual + added)
    assert plain[1] is None
    new, normed = add_norm(added, residual, weight, EPS, post_weight)
    assert torch.equal(new, residual + reference.rms_norm(added, post_weight, EPS))
    assert normed is not None
    assert torch.equal(normed, reference.rms_norm(new, weight, EPS))


@every_type
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_gates(dtype, activation):
    p = randn(3, 48, dtype=dtype)
    assert torch.equal(gated(p, activation), reference.ACTIVATIONS[activation](p[:, :24]) * p[:, 24:])


@every_type
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_rotated_and_written(dtype, normed):
    p, d, kv = randn(3, 8 * 16, dtype=dtype), device_pass([5, 900, 0], [7, 2, 31]), layer(32, 2, 16, dtype)
    rope = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    norms = (randn(16, dtype=dtype, seed=1), randn(16, dtype=dtype, seed=2)) if normed else (None, None)
    query = write_qkv(p, d, rope, kv, *norms, EPS, 4, 2)
    heads = p.view(3, 8, 16)
    cos, sin = cos_sin(d.positions, (rope, torch.ones(8)), dtype)
    states = [heads[:, :4], heads[:, 4:6]]
    if norms[0] is not None and norms[1] is not None:
        states = [reference.rms_norm(x, weight, EPS) for x, weight in zip(states, norms, strict=True)]
    assert torch.equal(query, rotate(states[0], cos, sin))
    assert torch.equal(kv.data[0, d.slots], rotate(states[1], cos, sin))
    assert torch.equal(kv.data[1, d.slots], heads[:, 6:])
    assert kv.data.count_nonzero() <= 2 * 3 * 2 * 16


def test_a_store_in_fp8_has_a_scale_per_token_and_head():
    p, d, kv = randn(2, 3 * 8, dtype=torch.float64), device_pass([0, 0], [1, 3]), layer(4, 1, 8, FP8)
    write_qkv(p, d, torch.ones(4), kv, None, None, EPS, 1, 1)
    values = kv.data[1].double() * kv.scales[1, :, :, None]
    assert (values[d.slots, 0] - p[:, 16:]).abs().max() < 0.07 * p[:, 16:].abs().max()
    assert kv.data[1, d.slots, 0].double().abs().amax(-1).tolist() == [448.0, 448.0]


def test_parts_are_finished_first():
    parts = Parts(randn(3, 2, 48, dtype=torch.float32), randn(48, dtype=torch.float16), torch.float16)
    assert torch.equal(gated(parts, "silu"), gated(finished(parts), "silu"))
    residual = randn(2, 48, dtype=torch.float16, seed=4)
    assert torch.equal(add_norm(parts, residual, None, EPS)[0], residual + finished(parts))


def test_no_operation_reads_a_number_back():
    with FakeTensorMode():
        p, kv = torch.randn(3, 8 * 16), layer(32, 2, 16, FP8)
        d = DevicePass(*(torch.zeros(n, dtype=torch.int64) for n in (3, 3, 3, 2)), *[torch.zeros(1, 1).long()] * 2)
        assert write_qkv(p, d, torch.ones(8), kv, torch.ones(16), torch.ones(16), EPS, 4, 2).shape == (3, 4, 16)
        hidden = embed(d.token_ids, torch.randn(9, 64), 3.3)
        added, normed = add_norm(gated(p, "silu"), hidden, torch.ones(64), EPS)
        assert normed is not None
        assert added.shape == rms_norm(normed, torch.ones(64), EPS).shape == (3, 64)
