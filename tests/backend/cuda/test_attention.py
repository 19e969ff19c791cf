"""Attention in PyTorch against the reference, and its promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.backend.cuda.attention import attend, check_heads, plan_attention
from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.kv_store import DeviceKV, new_kv
from paceline.backend.reference import attention as reference
from paceline.core.errors import ConfigError
from tests.backend.cuda.interpreter import run_interpreted
from tests.backend.cuda.passes import CPU, Case, Shape, make_case, row_alone, seeing_all, shapes

SCALE = 0.3


def attended(case: Case, shape: Shape) -> torch.Tensor:
    work = plan_attention(case.d, shape.group, shape.window)
    return attend(case.query, case.kv.layer(0), case.d, work, SCALE, shape.window)


def expected(case: Case, shape: Shape) -> torch.Tensor:
    tiles = reference.plan_tiles(case.packed, shape.group, CPU, shape.window)
    return reference.attend(case.query[: len(case.packed.positions)], case.kv.data[0], tiles, SCALE)


@settings(max_examples=40)
@given(shapes())
def test_it_is_the_references_attention_whatever_lies_in_other_slots(shape: Shape) -> None:
    case = make_case(shape)
    got, want = attended(case, shape), expected(case, shape)
    torch.testing.assert_close(got[: len(want)], want, rtol=1e-12, atol=1e-12)
    assert not got[len(want) :].any(), "padding tokens give zeros"


@settings(max_examples=10)
@given(shapes())
def test_tokens_of_a_block_see_all_of_it(shape: Shape) -> None:
    """As the reference has it, where every token stands at the last one's position."""
    shape = replace(shape, window=0)
    case = seeing_all(make_case(shape))
    got = attended(case, shape)
    assert case.d.last_keys is not None
    last = case.d.last_keys[: len(case.packed.positions)].numpy()
    want = expected(replace(case, packed=replace(case.packed, positions=last)), shape)
    torch.testing.assert_close(got[: len(want)], want, rtol=1e-12, atol=1e-12)
    assert not got[len(want) :].any(), "padding tokens give zeros"


def test_a_row_has_the_same_bits_alone_and_in_a_batch_and_in_chunks() -> None:
    shape = Shape(rows=((290, 5), (0, 40), (700, 1), (37, 4)), group=3)
    case = make_case(shape)
    whole = attended(case, shape)
    for row in range(len(shape.rows)):
        start, end = case.packed.cu_len[row : row + 2].tolist()
        assert torch.equal(attended(row_alone(case, row), shape), whole[start:end])
    for tokens in (slice(0, 7), slice(7, 8), slice(8, 40)):
        assert torch.equal(attended(row_alone(case, 1, tokens), shape), whole[5:45][tokens])


def test_rows_without_tokens_change_nothing() -> None:
    shape = Shape(rows=((20, 3), (5, 2)), num_padding=2)
    case = make_case(shape)
    d = case.d
    cu_len = torch.tensor([0, 0, 3, 3, 5, 5, 5])
    pages = d.pages[torch.tensor([0, 0, 1, 1, 0, 0])]
    sparse = DevicePass(d.token_ids, d.positions, d.slots, cu_len, pages, d.wanted)
    got = attend(case.query, case.kv.layer(0), sparse, plan_attention(sparse, 1, 0), SCALE, 0)
    assert torch.equal(got, attended(case, shape))


def test_many_tiles_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(rows=((3, 40), (300, 9)), group=3)
    case = make_case(shape)
    at_once = attended(case, shape)
    monkeypatch.setattr("paceline.backend.cuda.attention.MAX_GATHERED", 1)
    assert torch.equal(attended(case, shape), at_once)


def test_fp8_keys_and_values_are_numbers_times_scales() -> None:
    shape = Shape(rows=((20, 3), (0, 5)), group=4)
    case = make_case(shape)
    kv = new_kv(len(case.kv.data[0, 0]) // 16 - 1, 1, 2, 64, "fp8", torch.float32, CPU)
    assert kv.scales is not None
    kv.data.copy_(case.kv.data.nan_to_num().to(torch.float8_e4m3fn))
    kv.scales.copy_(torch.rand_like(kv.scales))
    plain = DeviceKV(kv.data.double() * kv.scales[..., None].double())
    work = plan_attention(case.d, 4, 0)
    got = attend(case.query, kv.layer(0), case.d, work, SCALE, 0)
    torch.testing.assert_close(got, attend(case.query, plain.layer(0), case.d, work, SCALE, 0), rtol=1e-12, atol=0)
    assert kv.bytes_per_token == 2 * 2 * (64 + 4)


def test_a_store_has_a_scratch_page_behind_its_slots() -> None:
    kv = new_kv(3, 2, 1, 8, "auto", torch.bfloat16, CPU)
    assert (kv.num_slots, kv.data.shape, kv.data.dtype) == (48, (2, 2, 64, 1, 8), torch.bfloat16)
    assert kv.bytes_per_token == 2 * 2 * 8 * 2
    assert kv.layer(1).data.data_ptr() == kv.data[1].data_ptr()


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(20, 4, 2), (264, 4, 2), (64, 5, 2), (64, 130, 2)])
def test_heads_that_no_kernel_takes_are_refused(head_dim: int, heads: int, kv_heads: int) -> None:
    with pytest.raises(ConfigError):
        check_heads(head_dim, heads, kv_heads)
    check_heads(80, 9, 3)
    check_heads(256, 4, 1)
    with pytest.raises(ConfigError, match="fp8"):
        check_heads(256, 4, 1, "fp8")


def test_a_pass_needs_no_number_from_the_device() -> None:
    case = make_case(Shape(rows=((20, 3), (5, 2)), num_padding=2))
    with FakeTensorMode() as mode:
        d = DevicePass(*(None if x is None else mode.from_tensor(x) for x in _fields(case.d)))
        kv = DeviceKV(mode.from_tensor(case.kv.data))
        out = attend(mode.from_tensor(case.query), kv.layer(0), d, plan_attention(d, 1, 9), SCALE, 9)
    assert out.shape == (7, 128)


def _fields(d: DevicePass) -> list[torch.Tensor | None]:
    return [getattr(d, name) for name in d.__slots__]


def test_kernels_do_the_same_in_the_interpreter() -> None:
    run_interpreted("interpreted_attention.py")
