"""Products whose sums go across ranks, by our kernels in Triton's interpreter. Run by `test_ranks.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.backend.cuda.kernel_launch import interpreted
from paceline.backend.cuda.matrix import Matrix
from paceline.backend.cuda.products import finished, kernel_product, pack_matrix, partial_product, segment_of_part
from paceline.backend.cuda.ranks import summed_product
from tests.backend.cuda.interpreted import mend_interpreter, poison, randn, same_bits

ROWS, WIDTH = 64, 2048  # four segments of 512
TYPES = {"f32": torch.float32, "f16": torch.float16, "int4": torch.float16}


class KnownRanks:
    """The last of some ranks, which knows what the others give."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts
        self.rank, self.size = len(parts), len(parts) + 1

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat([*self.parts, part])


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    assert interpreted()
    mend_interpreter(monkeypatch)
    poison(monkeypatch)


def packed(weight: torch.Tensor, weight_type: str, dim: int | None, size: int) -> Matrix:
    bias = randn(len(weight), seed=2)
    matrix = pack_matrix(weight, weight_type, TYPES[weight_type], torch.device("cpu"), bias)
    return replace(matrix, segment=segment_of_part(matrix.shape, dim, size))


def over_ranks(x: torch.Tensor, weight: torch.Tensor, weight_type: str, size: int) -> torch.Tensor:
    """The product of a matrix whose K `size` ranks share."""
    parts = [packed(part, weight_type, 1, size) for part in weight.chunk(size, 1)]
    tokens = [part.contiguous() for part in x.chunk(size, 1)]
    first = [partial_product(*own) for own in zip(tokens[:-1], parts[:-1], strict=True)]
    return finished(summed_product(tokens[-1], parts[-1], KnownRanks(first)))


@pytest.mark.parametrize("weight_type", TYPES)
def test_ranks_at_borders_of_segments_have_the_bits_of_one(weight_type):
    """One, two and four ranks; few tokens, whose segments run in parallel, and tokens whose run in order."""
    weight, x = randn(ROWS, WIDTH, seed=1) * WIDTH**-0.5, randn(5, WIDTH, dtype=TYPES[weight_type], seed=3)
    whole = packed(weight, weight_type, None, 1)
    assert (whole.segment, whole.num_segments) == (512, 4)
    expected = kernel_product(x, whole, parallel=False)
    for size in (2, 4) if weight_type == "f32" else (2,):
        assert same_bits(over_ranks(x, weight, weight_type, size), expected)


def test_ranks_within_a_segment_have_sums_of_their_own():
    """Eight ranks of 256: no border of a segment, so the sums are others, and as near."""
    weight, x = randn(ROWS, WIDTH, seed=1) * WIDTH**-0.5, randn(5, WIDTH, seed=3)
    expected = finished(kernel_product(x, packed(weight, "f32", None, 1), parallel=True))
    got = over_ranks(x, weight, "f32", 8)
    assert not same_bits(got, expected)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_columns_of_a_rank_have_the_bits_of_the_whole(size):
    """A rank's columns keep the whole matrix's segments, though a narrower matrix would have more."""
    weight, x = randn(256, 1024, seed=1) * 2**-5, randn(3, 1024, seed=3)
    whole = replace(packed(weight, "f32", None, 1), bias=None)
    parts = [replace(packed(part, "f32", 0, size), bias=None) for part in weight.chunk(size)]
    assert {m.segment for m in parts} == {whole.segment}
    columns = [finished(kernel_product(x, m, parallel=True)) for m in parts]
    assert same_bits(torch.cat(columns, dim=1), finished(kernel_product(x, whole, parallel=True)))
