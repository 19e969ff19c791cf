"""Attention kernels and their bits, in the interpreter. Run by `test_attention.py`."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.cuda.attention import _work_items, attend, plan_attention
from paceline.backend.cuda.kernel_launch import interpreted
from paceline.backend.cuda.kv_store import DeviceKV, new_kv
from tests.backend.cuda.interpreted import mend_interpreter, poison
from tests.backend.cuda.passes import CPU, Case, Shape, make_case, row_alone, seeing_all, shapes

SCALE = 0.1


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreted()
    mend_interpreter(monkeypatch)
    poison(monkeypatch)


def attended(case: Case, shape: Shape, fill: int | None = None) -> torch.Tensor:
    work = plan_attention(case.d, shape.group, shape.window, fill)
    return attend(case.query, case.kv.layer(0), case.d, work, SCALE, shape.window)


@settings(max_examples=6)
@given(shapes(max_new=20))
def test_kernels_agree_with_float64(shape: Shape) -> None:
    case = make_case(shape)
    want = attended(case, shape)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 3e-3)):
        got = attended(case.cast(dtype), shape, 4)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fill", [0, 1 << 16])
def test_tokens_of_a_block_see_all_of_it(fill: int) -> None:
    """Also where the block ends at or beside a part's end, and in units of scratch."""
    shape = Shape(rows=((0, 9), (247, 9), (248, 9), (600, 20)), group=2, num_kv_heads=1, num_padding=2)
    case = seeing_all(make_case(shape))
    got = attended(case.cast(torch.float32), shape, fill)
    torch.testing.assert_close(got.double(), attended(case, shape), rtol=2e-6, atol=2e-6)


@settings(max_examples=4)
@given(shapes(max_before=1200, max_new=9, max_rows=2))
def test_split_and_whole_tiles_have_the_same_bits(shape: Shape) -> None:
    case = make_case(shape).cast(torch.float16)
    assert torch.equal(attended(case, shape, 1 << 16), attended(case, shape, 0))


@settings(max_examples=25)
@given(shapes(max_before=3000, max_new=150, max_rows=5), st.sampled_from((0, 1, 20, 1 << 16)))
def test_a_work_list_covers_every_token_and_part_once_within_its_bounds(shape: Shape, fill: int) -> None:
    case = make_case(shape)
    work = plan_attention(case.d, shape.group, shape.window, fill)
    planned = _work_items(case.query.float(), shape.num_kv_heads, case.d, work)
    num_items, num_merged = planned.counts.tolist()
    assert num_items <= len(planned.items)
    assert num_merged <= len(planned.merged)
    covered, units = Counter[tuple[int, int]](), dict[int, tuple[int, int]]()
    for row, first, size, part, parts, unit, stride, _ in planned.items[:num_items].tolist():
        for t, p in product(range(size), range(part, part + parts)):
            covered[first + t, p] += 1
            if unit >= 0:
                assert units.setdefault(unit + t * stride, (first + t, p)) == (first + t, p)
        if row == len(shape.rows):
            assert parts == 0, "padding tokens see nothing"
            covered.update((first + t, -1) for t in range(size))
    window, first_keys = shape.window or 1 << 20, shape.first_keys or (0,) * len(shape.rows)
    for row, (start, end) in enumerate(pairwise(case.packed.cu_len.tolist())):
        for token in range(start, end):
            position = int(case.packed.positions[token])
            lowest = max(first_keys[row], position - window + 1)
            assert {(token, p) for p in range(lowest // 256, position // 256 + 1)} <= covered.keys()
    assert set(covered.values()) <= {1}
    assert {token for token, _ in covered} == set(range(len(case.query)))
    assert len(units) <= len(planned.part_weight)
    for token, unit, parts, _ in planned.merged[:num_merged].tolist():
        own = [units.pop(unit + p) for p in range(parts)]
        assert [t for t, _ in own] == [token] * parts
        assert [p for _, p in own] == list(range(own[0][1], own[0][1] + parts))
    assert not units, "every sum in scratch is merged"


@pytest.mark.parametrize("group", [1, 3])
def test_a_row_has_the_same_bits_alone_and_in_a_batch_and_in_chunks(group: int) -> None:
    shape = Shape(rows=((290, 5), (0, 24), (700, 1)), group=group, num_kv_heads=1)
    case = make_case(shape).cast(torch.float16)
    whole = attended(case, shape)
    for row in range(len(shape.rows)):
        start, end = case.packed.cu_len[row : row + 2].tolist()
        assert torch.equal(attended(row_alone(case, row), shape), whole[start:end])
    for tokens in (slice(0, 7), slice(7, 8), slice(8, 24)):
        assert torch.equal(attended(row_alone(case, 1, tokens), shape), whole[5:29][tokens])


@pytest.mark.parametrize("head_dim", [64, 80])
def test_tiles_of_few_and_many_rows_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    shape = Shape(rows=((290, 5), (70, 1), (0, 9)), group=3, num_kv_heads=1, head_dim=head_dim, window=200)
    case = make_case(shape).cast(torch.float16)
    found = []
    for rows in (16, 32, 64):
        monkeypatch.setattr("paceline.backend.cuda.attention.tile_rows", lambda *_, rows=rows: rows)
        found += [attended(case, shape, fill) for fill in (0, 1 << 16)]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("head_dim", [16, 80, 96, 256])
def test_heads_of_other_widths_are_padded(head_dim: int) -> None:
    shape = Shape(rows=((60, 3),), group=2, num_kv_heads=1, head_dim=head_dim)
    case = make_case(shape)
    got = attended(case.cast(torch.float16), shape)
    torch.testing.assert_close(got.double(), attended(case, shape), rtol=3e-3, atol=3e-3)


def test_fp8_keys_and_values_are_numbers_times_scales() -> None:
    shape = Shape(rows=((20, 3), (0, 5)), group=4)
    case = make_case(shape)
    kv = new_kv(case.kv.num_slots // 16, 1, 2, 64, "fp8", torch.float32, CPU)
    assert kv.scales is not None
    kv.data.copy_(case.kv.data.to(torch.float8_e4m3fn))  # NaN in unused slots
    kv.scales.copy_(torch.rand_like(kv.scales) + 0.5)
    work = plan_attention(case.d, 4, 0)
    want = attend(case.query, kv.layer(0), case.d, work, SCALE, 0)
    got = attend(case.query.float(), kv.layer(0), case.d, work, SCALE, 0)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)


def test_scratch_that_is_too_small_leaves_tiles_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(rows=((600, 2), (520, 1)), num_kv_heads=1)
    case = make_case(shape).cast(torch.float32)
    split = attended(case, shape, 1 << 16)
    for units in (0, 5, 8):
        monkeypatch.setattr("paceline.backend.cuda.attention.MAX_UNITS", units)
        assert torch.equal(attended(case, shape, 1 << 16), split)


def test_a_query_may_be_a_view_of_wider_rows() -> None:
    shape = Shape(rows=((20, 3),))
    case = make_case(shape).cast(torch.float32)
    wide = torch.randn(3, 6, 64)
    wide[:, :2] = case.query
    work = plan_attention(case.d, 1, 0)
    got = attend(wide[:, :2], DeviceKV(case.kv.data).layer(0), case.d, work, SCALE, 0)
    assert torch.equal(got, attended(case, shape))
