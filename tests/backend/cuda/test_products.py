"""Matrices in every type of weights, and products by PyTorch's operations; kernels run in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.backend.cuda import products
from paceline.backend.cuda.products import (
    GROUP,
    KINDS,
    PLAIN_TYPES,
    STEP,
    TALL,
    Parts,
    finished,
    multiply,
    pack_matrix,
    segment_of,
    unpacked,
)
from tests.backend.cuda.interpreter import run_interpreted

CPU = torch.device("cpu")


class Largest(TorchDispatchMode):
    """Notes how many floats the largest new tensor has."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
            self.largest = max(self.largest, found.numel())
        return found


def weight(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_kernels_in_the_interpreter():
    run_interpreted("interpreted_products.py")


@pytest.mark.parametrize(
    ("weight_type", "error"), [("f64", 0), ("f32", 1e-7), ("f16", 1e-3), ("fp8", 0.04), ("int4", 0.12)]
)
def test_packed_weights_stand_for_the_weights(weight_type, error):
    w = weight(24, 320)
    dtype = PLAIN_TYPES.get(weight_type, torch.float64)
    m = pack_matrix(w, weight_type, dtype, CPU)
    off = (unpacked(m, torch.float64) - w).norm() / w.norm()
    assert off <= error
    assert m.shape == (24, 320)


def test_quantised_weights_take_their_share_of_memory():
    sizes = {t: pack_matrix(weight(64, 1024), t, torch.float32, CPU).nbytes for t in ("f32", "fp8", "int4")}
    assert sizes["fp8"] / sizes["f32"] == pytest.approx(1 / 4, rel=0.01)
    assert sizes["int4"] / sizes["f32"] == pytest.approx((0.5 + 4 / GROUP) / 4, rel=0.01)


@pytest.mark.parametrize("weight_type", ["fp8", "int4"])
def test_large_matrices_are_packed_in_pieces(weight_type, monkeypatch):
    """Copies of a whole output matrix in float32 would take gigabytes; bits are the same."""
    w = weight(50, 320)
    whole = pack_matrix(w, weight_type, torch.bfloat16, CPU)
    monkeypatch.setattr(products, "PACKED_NUMBERS", 7 * 320)
    with Largest() as made:
        pieces = pack_matrix(w, weight_type, torch.bfloat16, CPU)
    assert 0 < made.largest <= 7 * 3 * GROUP
    assert torch.equal(pieces.data.view(torch.uint8), whole.data.view(torch.uint8))
    assert torch.equal(pieces.scale, whole.scale)


@pytest.mark.parametrize("weight_type", KINDS)
def test_zero_weights_stay_zero(weight_type):
    m = pack_matrix(torch.zeros(16, 130), weight_type, torch.float32, CPU)
    assert not unpacked(m, torch.float32).any()


@pytest.mark.parametrize("weight_type", ["f64", "int4", "fp8"])
def test_a_product_in_float64_is_exact(weight_type):
    bias = weight(1, 24)[0]
    m = pack_matrix(weight(24, 200), weight_type, torch.float64, CPU, bias)
    x = weight(5, 200, seed=1)
    product = finished(multiply(x, m))
    if weight_type == "fp8":  # activations of 3 bits beside the leading one
        assert (product - (x @ unpacked(m, torch.float64).T + bias)).abs().max() < 1.5
    else:
        torch.testing.assert_close(product, x @ unpacked(m, torch.float64).T + bias, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("weight_type", ["bf16", "f16", "f32", "fp8", "int4"])
def test_a_product_has_the_type_of_its_tokens(weight_type):
    dtype = PLAIN_TYPES.get(weight_type, torch.bfloat16)
    m = pack_matrix(weight(24, 200), weight_type, dtype, CPU)
    for fast in (False, True):
        assert finished(multiply(weight(3, 200).to(dtype), m, fast=fast)).dtype == dtype


def test_parts_are_added_in_order_and_then_the_bias():
    sums = torch.tensor([1e8, 1.0, -1e8]).repeat(2, 3, 1).permute(2, 0, 1)  # [3, 2, 3]
    p = Parts(sums.contiguous(), torch.tensor([0.0, 0.5, 1.0]), torch.float32)
    assert finished(p).tolist() == [[0.0, 0.5, 1.0]] * 2  # 1 is lost beside 1e8
    assert finished(replace(p, bias=None)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("rows", "width", "segments"),
    [
        (6144, 4096, 4),
        (4096, 4096, 4),
        (28672, 4096, 1),
        (4096, 14336, 4),
        (128256, 4096, 1),
        (10240, 5120, 2),
        (5120, 25600, 4),
        (960, 576, 1),
        (576, 1536, 3),
        (2048, 1536, 3),
    ],
)
def test_matrices_are_cut_to_fill_a_device(rows, width, segments):
    segment = segment_of(rows, width)
    assert -(-width // segment) == segments
    assert segment % STEP == 0


def test_every_shape_has_segments_that_cover_it():
    for rows in (1, 64, 500, 5000, 50_000):
        for width in range(1, 9000, 37):
            segment = segment_of(rows, width)
            assert segment % STEP == 0
            assert segment > 0
            assert width <= segment or segment >= 512


@pytest.mark.parametrize(("capability", "stages"), [((8, 0), (4, 5, 4, 5)), ((8, 9), (4, 4, 3, 4))])
def test_devices_of_little_shared_memory_get_fewer_stages(capability, stages, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(products, "_is_small", products._is_small.__wrapped__)  # which remembers
    with FakeTensorMode():
        tokens = [torch.empty(n, 256, dtype=torch.bfloat16, device="cuda:0") for n in (16, 64, 64, 128)]
    found = [products._blocks("plain", x, rows) for x, rows in zip(tokens, (64, 64, TALL, 64), strict=True)]
    assert tuple(blocks.num_stages for blocks in found) == stages


def test_no_product_reads_a_number_back():
    with FakeTensorMode():
        for weight_type in KINDS:
            dtype = PLAIN_TYPES.get(weight_type, torch.float32)
            m = pack_matrix(torch.randn(24, 256), weight_type, dtype, CPU, torch.randn(24))
            assert finished(multiply(torch.randn(3, 256).to(dtype), m)).shape == (3, 24)
