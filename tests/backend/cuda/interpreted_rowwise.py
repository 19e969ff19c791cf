"""Operations over a token's row in Triton's interpreter. Run by `test_rowwise.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.kernel_launch import interpreted
from paceline.backend.cuda.products import FP8, Parts, finished
from paceline.backend.cuda.rowwise import add_norm, embed, gated, rms_norm, write_qkv
from tests.backend.cuda.interpreted import mend_interpreter, plain, poison, randn, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
EPS = 1e-5
every_type = pytest.mark.parametrize("dtype", [F32, F16, BF16])
every_number_of_parts = pytest.mark.parametrize("parts", [0, 1, 3])


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    assert interpreted()
    mend_interpreter(monkeypatch)
    poison(monkeypatch)


def product(count: int, width: int, dtype: torch.dtype, parts: int, *, bias: bool = False) -> Parts | torch.Tensor:
    if not parts:
        return randn(count, width, dtype=dtype, seed=5)
    return Parts(randn(parts, count, width, seed=5), randn(width, dtype=dtype, seed=6) if bias else None, dtype)


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    tolerance = {F16: 2e-3, F32: 1e-5, BF16: 1.6e-2}[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def as_pytorch_does(operation: Callable[..., Any], *args: Any) -> Any:
    with plain():
        return operation(*args)


@every_type
@pytest.mark.parametrize("scale", [1.0, 24.0, 576**0.5])
def test_embeddings_are_scaled_rows(dtype, scale):
    table, ids = randn(50, 72, dtype=dtype), torch.tensor([3, 49, 0, 3])
    assert same_bits(embed(ids[1:], table, scale), as_pytorch_does(embed, ids[1:], table, scale))


@every_type
@pytest.mark.parametrize("shape", [(3, 576), (5, 2, 64), (1, 33)])
def test_norms(dtype, shape):
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    assert_near(rms_norm(x, weight, EPS), as_pytorch_does(rms_norm, x, weight, EPS))


@every_type
@every_number_of_parts
@pytest.mark.parametrize(("post", "norm"), [(False, True), (True, True), (False, False)])
def test_products_are_added_and_normed(dtype, parts, post, norm):
    p, residual = product(3, 96, dtype, parts, bias=True), randn(3, 96, dtype=dtype, seed=7)
    weight, post_weight = (
        randn(96, dtype=dtype, seed=s) if there else None for s, there in ((8, norm), (9, post))
    )
    got = add_norm(p, residual, weight, EPS, post_weight)
    expected = as_pytorch_does(add_norm, p, residual, weight, EPS, post_weight)
    assert_near(got[0], expected[0])
    assert (got[1] is not None) == (expected[1] is not None) == norm
    if norm:
        assert_near(got[1], expected[1])


@every_type
@every_number_of_parts
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates(dtype, parts, activation):
    p = product(3, 2 * 80, dtype, parts, bias=True)
    assert_near(gated(p, activation), as_pytorch_does(gated, p, activation))


@pytest.mark.filterwarnings("ignore:overflow")
def test_gates_of_large_numbers_are_finite():
    p = torch.tensor([[-1e4, 1e4, -90.0, 90.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for activation in ("silu", "gelu_tanh"):
        assert_near(gated(p, activation), as_pytorch_does(gated, p, activation))


class Case:
    """Arguments of `write_qkv`: some tokens at random positions and slots of a poisoned store."""

    def __init__(self, dtype=F32, kv_dtype=None, *, heads=(4, 2, 64), parts=0, count=3, normed=False, bias=False):
        self.num_heads, self.num_kv_heads, dim = heads
        kv_dtype = kv_dtype or dtype
        width = (self.num_heads + 2 * self.num_kv_heads) * dim
        self.p = product(count, width, dtype, parts, bias=bias)
        generator = torch.Generator().manual_seed(count)
        positions = torch.randint(0, 9000, (count + 1,), generator=generator)[1:]  # at an odd address
        slots = torch.randperm(64, generator=generator)[1 : count + 1]
        zeros = torch.zeros(1, dtype=torch.int64)
        self.d = DevicePass(zeros, positions, slots, zeros, zeros[None], zeros)
        self.rope = 10000.0 ** (-torch.arange(0, dim, 2, dtype=F32) / dim)
        data = torch.full((2, 64, self.num_kv_heads, dim), torch.nan).to(kv_dtype)
        scales = torch.full((2, 64, self.num_kv_heads), torch.nan) if kv_dtype == FP8 else None
        self.layer: Any = SimpleNamespace(data=data, scales=scales)
        self.norms = tuple(randn(dim, dtype=dtype, seed=s) if normed else None for s in (11, 12))

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        layer: Any = SimpleNamespace(data=self.layer.data.clone(), scales=None)
        if self.layer.scales is not None:
            layer.scales = self.layer.scales.clone()
        query = write_qkv(self.p, self.d, self.rope, layer, *self.norms, EPS, self.num_heads, self.num_kv_heads)
        return query, layer.data, layer.scales

    def check(self) -> None:
        query, data, scales = self.run()
        with plain():
            expected, expected_data, expected_scales = self.run()
        assert_near(query, expected)
        written = torch.zeros(64, dtype=torch.bool)
        written[self.d.slots] = True
        assert same_bits(data[:, ~written], self.layer.data[:, ~written])
        if scales is None:
            assert_near(data[:, written].to(query.dtype), expected_data[:, written].to(query.dtype))
            return
        assert expected_scales is not None
        assert same_bits(scales[:, ~written], self.layer.scales[:, ~written])
        torch.testing.assert_close(scales[:, written], expected_scales[:, written], rtol=2e-3, atol=0)
        numbers, close = (d[:, written].float() * s[:, written, :, None] for d, s in
                          ((data, scales), (expected_data, expected_scales)))  # fmt: skip
        torch.testing.assert_close(numbers, close, rtol=0.13, atol=1e-2)  # one step of e4m3


@every_type
@every_number_of_parts
@pytest.mark.parametrize("normed", [False, True])
def test_heads(dtype, parts, normed):
    Case(dtype, parts=parts, normed=normed, bias=True).check()


@pytest.mark.parametrize(
    "heads", [(3, 3, 64), (9, 3, 64), (8, 2, 128), (8, 1, 128), (4, 1, 256), (5, 1, 16), (4, 4, 80), (3, 1, 96)]
)
def test_heads_of_many_shapes(heads):
    Case(F16, heads=heads, parts=2, normed=True, count=2).check()


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(F32, F16), (F32, FP8), (F16, FP8), (F16, F32)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_stores_of_other_types(dtype, kv_dtype, head_dim):
    Case(dtype, kv_dtype, heads=(4, 2, head_dim), parts=2).check()


@every_type
def test_parts_and_finished_products_have_the_same_bits(dtype):
    parts = product(4, 192, dtype, 3, bias=True)
    whole = finished(parts)
    residual, weight = randn(4, 192, dtype=dtype, seed=7), randn(192, dtype=dtype, seed=8)
    for a, b in zip(*(add_norm(p, residual, weight, EPS) for p in (parts, whole)), strict=True):
        assert same_bits(a, b)
    assert same_bits(gated(parts, "silu"), gated(whole, "silu"))
    case = Case(dtype, heads=(4, 1, 32), count=4)
    results = []
    for p in (parts, whole):
        case.p = p
        results.append(case.run())
    for a, b in zip(results[0][:2], results[1][:2], strict=True):
        assert same_bits(a, b)


@settings(max_examples=10)
@given(
    count=st.integers(1, 4),
    width=st.integers(1, 200),
    parts=st.integers(0, 4),
    dtype=st.sampled_from([F16, F32]),
    bias=st.booleans(),
)
def test_a_row_has_the_same_bits_alone(count, width, parts, dtype, bias):
    p = product(count, 2 * width, dtype, parts, bias=bias)
    residual, weight = randn(count, 2 * width, dtype=dtype, seed=7), randn(2 * width, dtype=dtype, seed=8)
    together = [*add_norm(p, residual, weight, EPS), gated(p, "gelu_tanh"), finished(p)]
    for row in range(count):
        own = slice(row, row + 1)
        one = Parts(p.sums[:, own].clone(), p.bias, dtype) if isinstance(p, Parts) else p[own].clone()
        alone = [*add_norm(one, residual[own].clone(), weight, EPS), gated(one, "gelu_tanh"), finished(one)]
        for a, b in zip(together, alone, strict=True):
            assert same_bits(a[own], b)
