"""Random passes over poisoned stores, for tests of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.kv_store import DeviceKV, new_kv
from paceline.backend.seam import Packed
from paceline.core.nouns import PAGE_TOKENS

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """A pass and the heads that attend."""

    rows: tuple[tuple[int, int], ...]  # tokens before those of the pass, tokens of it
    group: int = 1
    num_kv_heads: int = 2
    head_dim: int = 64
    window: int = 0
    first_keys: tuple[int, ...] | None = None  # at most the first position of each row
    num_padding: int = 0
    spare_pages: int = 0
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads


@dataclass(frozen=True)
class Case:
    """A pass on the device, its twin for the reference, query and store in float64."""

    d: DevicePass
    packed: Packed  # without padding
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    kv: DeviceKV  # one layer

    def cast(self, dtype: torch.dtype) -> Case:
        return replace(self, query=self.query.to(dtype), kv=DeviceKV(self.kv.data.to(dtype), self.kv.scales))


@st.composite
def shapes(draw: st.DrawFn, *, max_before: int = 300, max_new: int = 40, max_rows: int = 3) -> Shape:
    row = st.tuples(st.integers(0, max_before), st.sampled_from((1, 1, 2, 4, 5, max_new)))
    rows = tuple(draw(st.lists(row, min_size=1, max_size=max_rows)))
    first_keys = st.tuples(*(st.integers(0, before) for before, _ in rows))
    return Shape(
        rows=rows,
        group=draw(st.sampled_from((1, 3, 4, 8))),
        num_kv_heads=draw(st.sampled_from((1, 2))),
        head_dim=draw(st.sampled_from((64, 128))),
        window=draw(st.sampled_from((0, 0, 1, 20, 300))),
        first_keys=draw(st.one_of(st.none(), first_keys)),
        num_padding=draw(st.sampled_from((0, 0, 3))),
        spare_pages=draw(st.sampled_from((0, 2))),
        seed=draw(st.integers(0, 5)),
    )


def make_case(shape: Shape) -> Case:
    """Return a pass whose rows lie in pages at random. Slots that no token sees are NaN."""
    chance = np.random.default_rng(shape.seed)
    lengths = [before + new for before, new in shape.rows]
    counts = [-(-n // PAGE_TOKENS) for n in lengths]
    max_pages = max(counts) + shape.spare_pages
    free = chance.permutation(sum(counts) + 3)
    pages, taken = np.zeros((len(lengths), max_pages), np.int64), 0
    for row, count in enumerate(counts):
        pages[row, :count] = free[taken : taken + count]
        taken += count
    positions = [np.arange(before, before + new) for before, new in shape.rows]
    cu_len = np.concatenate([[0], np.cumsum([new for _, new in shape.rows])])
    packed = Packed(
        token_ids=np.zeros(cu_len[-1], np.int64),
        positions=np.concatenate(positions),
        slots=np.concatenate([slots_of(pages[row], p) for row, p in enumerate(positions)]),
        cu_len=cu_len,
        pages=pages,
        wanted=np.empty(0, np.int64),
        first_keys=None if shape.first_keys is None else np.array(shape.first_keys, np.int64),
    )
    kv = new_kv(len(free), 1, shape.num_kv_heads, shape.head_dim, "f64", torch.float64, CPU)
    kv.data.fill_(torch.nan)
    generator = torch.Generator().manual_seed(shape.seed)
    for row, length in enumerate(lengths):
        first = 0 if shape.first_keys is None else shape.first_keys[row]
        if shape.window:
            first = max(first, shape.rows[row][0] - shape.window + 1)
        slots = torch.from_numpy(slots_of(pages[row], np.arange(first, length)))
        heads = 2, len(slots), shape.num_kv_heads, shape.head_dim
        kv.data[0][:, slots] = torch.randn(heads, generator=generator).double()
    num_tokens = len(packed.positions) + shape.num_padding
    query = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=generator).double()
    return Case(padded(packed, shape.num_padding, kv.num_slots), packed, query, kv)


def slots_of(pages: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


def padded(packed: Packed, num_padding: int, scratch_slot: int) -> DevicePass:
    """Return a pass on the host as a device keeps it, with padding tokens behind."""

    def with_padding(array: np.ndarray, value: int) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([array, np.full(num_padding, value, np.int64)]))

    return DevicePass(
        token_ids=with_padding(packed.token_ids, 0),
        positions=with_padding(packed.positions, 0),
        slots=with_padding(packed.slots, scratch_slot),
        cu_len=torch.from_numpy(packed.cu_len.copy()),
        pages=torch.from_numpy(packed.pages.copy()),
        wanted=torch.from_numpy(packed.wanted.copy()),
        first_keys=None if packed.first_keys is None else torch.from_numpy(packed.first_keys.copy()),
    )


def seeing_all(case: Case) -> Case:
    """Return a pass whose tokens see as much as the last one of their row."""
    last = case.d.positions.clone()
    for start, end in pairwise(case.packed.cu_len.tolist()):
        last[start:end] = last[end - 1]
    return replace(case, d=replace(case.d, last_keys=last))


def row_alone(case: Case, row: int, tokens: slice = slice(None)) -> Case:
    """Return a pass over some tokens of one row, at the same places of the same store."""
    start, end = case.packed.cu_len[row : row + 2].tolist()
    some = np.arange(start, end)[tokens]
    packed = replace(
        case.packed,
        token_ids=case.packed.token_ids[some],
        positions=case.packed.positions[some],
        slots=case.packed.slots[some],
        cu_len=np.array([0, len(some)]),
        pages=case.packed.pages[row : row + 1],
        first_keys=None if case.packed.first_keys is None else case.packed.first_keys[row : row + 1],
    )
    return Case(padded(packed, 0, case.kv.num_slots), packed, case.query[torch.from_numpy(some)], case.kv)
