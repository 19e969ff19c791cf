"""Products by our kernels in Triton's interpreter. Run by `test_products.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.cuda import products
from paceline.backend.cuda.kernel_launch import interpreted
from paceline.backend.cuda.matrix import Matrix
from paceline.backend.cuda.products import Parts, finished, kernel_product, multiply, pack_matrix
from paceline.backend.cuda.tiles import STEP, TILES, best_tile, multiply_by
from tests.backend.cuda.interpreted import mend_interpreter, plain, poison, randn, same_bits

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
PLAIN_TYPE = {F16: "f16", F32: "f32", BF16: "bf16"}
TYPES = [("plain", F32), ("plain", F16), ("plain", BF16), ("fp8", F32), ("fp8", F16), ("int4", F32), ("int4", F16)]
every_type = pytest.mark.parametrize(("kind", "dtype"), TYPES)


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    assert interpreted()
    mend_interpreter(monkeypatch)
    poison(monkeypatch)


def matrix(
    rows: int, width: int, kind: str, dtype: torch.dtype, *, segment: int = 128, bias: bool = False
) -> Matrix:
    weight = randn(rows, width, seed=1) * width**-0.5
    own_bias = randn(rows, seed=2) if bias else None
    packed = pack_matrix(
        weight, PLAIN_TYPE[dtype] if kind == "plain" else kind, dtype, torch.device("cpu"), own_bias
    )
    return replace(packed, segment=segment)


def tokens(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return randn(count, width, dtype=dtype, seed=3)


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {F16: 2e-3, F32: 2e-5, BF16: 2e-2}[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@every_type
@pytest.mark.parametrize("parallel", [True, False])
def test_a_product_is_what_pytorch_says(kind, dtype, parallel):
    m, x = matrix(80, 320, kind, dtype, bias=True), tokens(5, 320, dtype)
    product = kernel_product(x, m, parallel=parallel)
    assert isinstance(product, Parts) == parallel
    with plain():
        expected = multiply(
            x.double(), m if kind != "plain" else replace(m, data=m.data.double(), bias=m.bias.double())
        )
    assert_near(finished(product), expected)


@every_type
def test_parts_are_what_segments_in_order_are(kind, dtype):
    m, x = matrix(70, 448, kind, dtype, bias=True), tokens(19, 448, dtype)
    parts, in_order = (kernel_product(x, m, parallel=parallel) for parallel in (True, False))
    assert parts.shape == in_order.shape == (19, 70)
    assert len(parts.sums) == 4
    assert same_bits(finished(parts), in_order)


@every_type
def test_a_token_has_the_same_bits_alone_and_in_a_batch(kind, dtype):
    """Tries block sizes with equal steps of K: within a step the interpreter's sums know no order."""
    m, x = matrix(64, 256, kind, dtype), tokens(49, 256, dtype)
    together = kernel_product(x, m, parallel=False)
    for first, last in [(0, 1), (48, 49), (7, 10), (16, 48)]:
        assert same_bits(finished(kernel_product(x[first:last].clone(), m, parallel=True)), together[first:last])


@pytest.mark.parametrize("kind", ["plain", "fp8", "int4"])
def test_blocks_of_many_tokens_are_right_and_keep_their_neighbours_apart(kind):
    m, x = matrix(136, 192, kind, F16, bias=True), tokens(140, 192, F16)
    product = kernel_product(x, m, parallel=False)
    with plain():
        assert_near(product, multiply(x, m))
    x[5] = torch.nan
    broken = kernel_product(x, m, parallel=False)
    assert broken[5].isnan().all()
    assert same_bits(broken[:5], product[:5])
    assert same_bits(broken[6:], product[6:])


WAYS = [(way, tile) for way, known in TILES.items() for tile in known]


@pytest.mark.parametrize(("way", "tile"), WAYS)
@pytest.mark.parametrize(("rows", "width", "count"), [(136, 320, 70), (264, 448, 200)])
def test_every_tile_has_the_bits_of_a_block(way, tile, rows, width, count):
    """The block has the same steps of K as the tile."""
    segment = width if way == "one" else 128
    m, x = matrix(rows, width, "plain", F16, segment=segment, bias=True), tokens(count, width, F16)
    got = multiply_by(tile, way, x, m)
    if way == "parts":
        got = finished(Parts(got, m.bias, F16))
    assert products.BLOCKS["plain"][-1].step == STEP
    assert same_bits(got, products.block_product(x, m, parallel=False))


def test_a_tile_is_chosen_by_waves():
    """A wave of 132 tiles: 256 tokens fill it with parts only; 2048 tokens fill it better with tiles of 192."""
    assert (
        best_tile(4096, 14336, 3584, 256, 132, "parts")[1] < best_tile(4096, 14336, 3584, 256, 132, "in order")[1]
    )
    for way in ("parts", "in order"):
        assert best_tile(6144, 4096, 1024, 2048, 132, way)[0] == TILES[way][0]


@settings(max_examples=12)
@given(
    data=st.data(),
    kind_and_type=st.sampled_from(TYPES),
    count=st.integers(1, 40),
    rows=st.integers(1, 150),
    width=st.integers(1, 300),
    segment=st.sampled_from([128, 256, 512]),
    bias=st.booleans(),
)
def test_any_shape(data, kind_and_type, count, rows, width, segment, bias):
    kind, dtype = kind_and_type
    m, x = matrix(rows, width, kind, dtype, segment=segment, bias=bias), tokens(count, width, dtype)
    in_order = kernel_product(x, m, parallel=False)
    with plain():
        assert_near(in_order, multiply(x, m))
    assert same_bits(finished(kernel_product(x, m, parallel=True)), in_order)


def test_no_tokens_make_no_product():
    m = matrix(64, 128, "fp8", F16)
    assert multiply(tokens(0, 128, F16), m).shape == (0, 64)
    assert finished(kernel_product(tokens(0, 128, F16), m, parallel=True)).shape == (0, 64)


@pytest.mark.parametrize(
    ("count", "processors", "parallel"),
    [(2, 2, False), (2, 3, True), (2, 4, True), (20, 3, False), (20, 4, True)],
)
def test_few_blocks_run_their_segments_in_parallel(monkeypatch, count, processors, parallel):
    """Two blocks: on four processors always, on three where the sums are small beside the weights."""
    m, x = matrix(128, 256, "plain", F32), tokens(count, 256, F32)
    monkeypatch.setattr(products, "num_processors", lambda device: processors)
    assert isinstance(multiply(x, m), Parts) == parallel
    assert isinstance(multiply(x, replace(m, segment=256)), torch.Tensor)


def test_tokens_are_quantised_as_pytorch_quantises_them():
    x = tokens(6, 300, F32)
    x[1], x[2, 3] = 0.0, 1e4
    got, expected = products._quantised_tokens(x), products.quantise_rows(x)
    assert same_bits(got[0], expected[0])
    assert same_bits(got[1], expected[1])
    x[4, 5] = torch.nan
    assert products._quantised_tokens(x)[0].float().isnan().nonzero().tolist() == [[4, 5]]
