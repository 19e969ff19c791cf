"""Checks of attention, writes of keys and values, choices, verdicts and pointers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from paceline.backend.cuda.attention import FEW_TOKENS, attend, plan_attention
from paceline.backend.cuda.choice import ChoiceSpecs, choose
from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.judge import judge
from paceline.backend.cuda.kv_store import DeviceKV, new_kv
from paceline.backend.cuda.late_hints import LateHints
from paceline.backend.cuda.late_lookup import longest_matches
from paceline.backend.cuda.rowwise import write_qkv
from paceline.backend.seam import HintRule, Pointers
from paceline.core.nouns import PAGE_TOKENS
from tools.gpu.checks import BOUNDS, EPS, FP8_BOUND, SOME_TOKENS, Check, random_product, wide, wide_product
from tools.gpu.rows_checks import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.backend.cuda.products import Product
    from tools.gpu.sizes import Sizes

SCALE = 0.09
WINDOW = 300  # keys that a token sees, where windows are checked
ONE_PART, ALL_PARTS = 1 << 20, 1  # values of `fill` that make an item of each part, or of all parts of a tile
RULE = HintRule(min_match=1, max_match=8, gain=1.5)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCase:
    """A pass of some rows, its queries, and a store whose other slots hold NaN."""

    tokens: DevicePass
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    kv: DeviceKV  # one layer
    group: int
    window: int

    def attended(self, fill: int | None = None) -> list[torch.Tensor]:
        """Attend. fill: programs that fill the device, which decides where tiles are split."""
        work = plan_attention(self.tokens, self.group, self.window, fill)
        return [attend(self.query, self.kv.layer(0), self.tokens, work, SCALE, self.window)]

    def wide(self) -> AttentionCase:
        """Return the same in float64."""
        scales = self.kv.scales
        data = self.kv.data.double() if scales is None else self.kv.data.double() * scales[..., None].double()
        return replace(self, query=self.query.double(), kv=DeviceKV(data))

    def row_alone(self, row: int, rows: Sequence[tuple[int, int]]) -> tuple[AttentionCase, slice]:
        """Return a pass over one row, and its tokens' places here. rows: as in `attention_case`."""
        start = sum(new for _, new in rows[:row])
        some = slice(start, start + rows[row][1])
        d = self.tokens
        tokens = DevicePass(
            token_ids=d.token_ids[some],
            positions=d.positions[some],
            slots=d.slots[some],
            cu_len=torch.tensor([0, rows[row][1]], device=d.cu_len.device),
            pages=d.pages[row : row + 1],
            wanted=d.wanted[:0],
            first_keys=None if d.first_keys is None else d.first_keys[row : row + 1],
        )
        return replace(self, tokens=tokens, query=self.query[some]), some


def attention_case(
    rows: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    kv_type: str,
    device: torch.device,
    *,
    window: int = 0,
    first_keys: bool = False,
) -> AttentionCase:
    """Return a case.

    rows: for each row, its tokens before the pass and in it. heads: KV heads, query heads of each, head size.
    """
    kv_heads, group, head_dim = heads
    lengths = [before + new for before, new in rows]
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    shuffled = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(len(rows)))
    pages = torch.zeros(len(rows), max(counts), dtype=torch.int64)
    written, taken = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages[row, :count] = shuffled[taken : taken + count]
        taken += count
        written.append(_slots(pages[row], torch.arange(length)))
    positions = [torch.arange(before, before + new) for before, new in rows]
    news = torch.tensor([0, *(new for _, new in rows)])
    tokens = DevicePass(
        token_ids=torch.zeros(int(news.sum()), dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat([_slots(pages[row], where) for row, where in enumerate(positions)]),
        cu_len=news.cumsum(0),
        pages=pages,
        wanted=torch.empty(0, dtype=torch.int64),
        first_keys=torch.tensor([before // 2 for before, _ in rows]) if first_keys else None,
    )
    query = torch.randn(len(tokens.positions), kv_heads * group, head_dim, device=device).to(dtype)
    kv = new_kv(len(shuffled), 1, kv_heads, head_dim, kv_type, dtype, device)
    _fill(kv, torch.cat(written).to(device))
    return AttentionCase(_moved(tokens, device), query, kv, group, window)


def _fill(kv: DeviceKV, written: torch.Tensor) -> None:
    """Write random numbers at some slots, NaN at all others."""
    data = torch.full(kv.data.shape[1:], torch.nan, device=kv.data.device)
    data[:, written] = torch.randn(2, len(written), *kv.data.shape[3:], device=kv.data.device)
    kv.data[0].copy_(data.to(kv.data.dtype))
    if kv.scales is not None:
        kv.scales.copy_(torch.rand(kv.scales.shape, device=kv.scales.device) + 0.5)


def _slots(pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


def _moved(d: DevicePass, device: torch.device) -> DevicePass:
    first_keys = None if d.first_keys is None else d.first_keys.to(device)
    names = ("token_ids", "positions", "slots", "cu_len", "pages", "wanted")
    return DevicePass(**{name: getattr(d, name).to(device) for name in names}, first_keys=first_keys)


def attention_of(sizes: Sizes, device: torch.device) -> Iterator[Check]:
    """Yield attention of every shape and type of keys, tiles whole and split."""
    bf16, first = torch.bfloat16, sizes.heads[0]
    few = tuple(row for row in sizes.rows if row[1] <= FEW_TOKENS)  # tiles of fewer rows
    asked = []
    for rows in (sizes.rows, few):
        asked += [(rows, heads, bf16, kv_type) for kv_type in ("bf16", "fp8") for heads in sizes.heads]
        asked += [(rows, first, torch.float16, "f16"), (rows, first, torch.float32, "f32")]
    asked += [(((30, 1),) * count, first, bf16, "bf16") for count in sizes.many_short_rows]
    for rows, heads, dtype, kv_type in asked:
        for window, first_keys in ((0, False), (WINDOW, False), (0, True)):
            case = attention_case(rows, heads, dtype, kv_type, device, window=window, first_keys=first_keys)
            expected = case.wide()
            for fill, ways in ((ALL_PARTS, "whole"), (ONE_PART, "split")):
                name = f"attend {len(rows)} rows {heads} {kv_type} window {window}{' holes' * first_keys}, {ways}"
                yield Check(name, partial(case.attended, fill), expected.attended, BOUNDS[dtype])


# Keys and values ----------------------------------------------------------------------------------


def writes_of(sizes: Sizes, device: torch.device) -> Iterator[Check]:
    """Yield writes of keys and values, and rotated queries."""
    kv_heads, group, head_dim = sizes.heads[0]
    bf16 = torch.bfloat16
    usual = (group * kv_heads, kv_heads, head_dim)
    for heads, parts, dtype, kv_type, bias, normed in (
        (usual, 0, bf16, "bf16", False, False),
        (usual, 4, bf16, "bf16", False, False),
        ((2 * usual[0], kv_heads, head_dim), 2, bf16, "bf16", True, True),
        (usual, 4, bf16, "fp8", False, False),
        ((9, 3, 64), 0, torch.float32, "f32", False, False),
        ((4, 1, 256), 0, bf16, "bf16", False, True),
        ((32, 32, 96), 0, bf16, "bf16", False, False),
        ((32, 32, 80), 2, bf16, "fp8", True, True),
    ):
        p = random_product(SOME_TOKENS, (heads[0] + 2 * heads[1]) * heads[2], parts, dtype, device, bias=bias)
        q_norm, k_norm = (torch.randn(heads[2], device=device).to(dtype) if normed else None for _ in range(2))
        name = f"write {heads} {kv_type}, {parts} parts{' bias' * bias}{' normed' * normed}"
        want = partial(_written, wide_product(p), heads, "f64", (wide(q_norm), wide(k_norm)))
        bound = FP8_BOUND if kv_type == "fp8" else BOUNDS[dtype]
        yield Check(name, partial(_written, p, heads, kv_type, (q_norm, k_norm)), want, bound)


def _written(
    p: Product, heads: tuple[int, int, int], kv_type: str, norms: tuple[torch.Tensor | None, torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return the queries, and keys and values as they lie in the store."""
    device, head_dim, dtype = (p if isinstance(p, torch.Tensor) else p.sums).device, heads[2], p.dtype
    kv = new_kv(3, 1, heads[1], head_dim, kv_type, dtype, device)
    slots = (torch.arange(SOME_TOKENS + 1, device=device) * 7 + 3)[1:]  # begins at an odd address
    positions = (torch.arange(SOME_TOKENS + 1, device=device) * 1111)[1:]
    none = slots[:0]
    d = DevicePass(none, positions, slots, none, none[None], none)
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    layer = kv.layer(0)
    query = write_qkv(p, d, inverse, layer, norms[0], norms[1], EPS, heads[0], heads[1])
    if layer.scales is None:
        return [query, layer.data.index_select(1, slots)]
    stored = layer.data.view(torch.uint8).index_select(1, slots).view(layer.data.dtype).to(torch.float32)
    return [query, stored * layer.scales.index_select(1, slots)[..., None]]


# Choice and judge ---------------------------------------------------------------------------------


def choices_of(sizes: Sizes, device: torch.device) -> Iterator[Check]:
    """Yield choices, of a draft vocabulary and with a hint, too; verdicts, pointers and rows."""
    vocab, places = sizes.vocab_size, 12
    logits = torch.randn(places, vocab, device=device) * 3
    ids = torch.arange(vocab // 4, device=device) * 4
    hints = {
        "hint_ids": torch.arange(places, device=device) * 4 - 4,
        "hint_add": torch.full((places,), 9.0, device=device),
    }
    for name, some, dtype, more in (
        ("choose", logits, torch.float64, {}),
        ("choose, float32 temperatures", logits[:, : vocab - 1].contiguous(), torch.float32, {}),
        ("choose of a draft vocabulary", logits[:, : len(ids)].contiguous(), torch.float64, {"draft_ids": ids}),
        ("choose with hints", logits, torch.float64, hints),
        (
            "choose of a draft vocabulary with hints",
            logits[:, : len(ids)].contiguous(),
            torch.float64,
            {"draft_ids": ids, **hints},
        ),
    ):
        specs = choice_rules(places, device, dtype)
        yield Check(name, partial(_chosen, some, specs, more), partial(_chosen_on_host, some, specs, more), 0.0)
    rows, depth = 200, 5
    drafts = torch.arange(rows * depth, device=device).view(rows, depth) % 9
    counts = torch.arange(rows, device=device) % (depth + 1)
    first = (counts + 1).cumsum(0) - counts - 1
    chosen = torch.arange(rows * (depth + 1), device=device) * 5 % 11 - 1
    arguments = chosen, first, counts, drafts, torch.arange(rows, device=device) % 7
    yield Check("judge", partial(_judged, arguments), partial(_judged_on_host, arguments), 0.0)
    texts = torch.arange(rows * 600, device=device).view(rows, 600).square() % 17 % 3
    lengths = torch.arange(rows, device=device) * 3 + 1
    yield Check("pointers", partial(_matched, texts, lengths), partial(_matched_on_host, texts, lengths), 0.0)
    yield Check("hints", partial(_hinted, texts, lengths), partial(_hinted_on_host, texts, lengths), 0.0)
    yield from rows_of(device)


def choice_rules(places: int, device: torch.device, dtype: torch.dtype) -> ChoiceSpecs:
    """Return rules of temperatures 0 to 1.5."""
    place = torch.arange(places, device=device)
    temperature = torch.tensor([0.0, 0.3, 0.7, 1.0, 1.5, 1e-7], dtype=dtype).to(device)
    return ChoiceSpecs(
        seed_lo=place * 40503 + 1,
        seed_hi=place,
        choice=place % 3,
        position=place * 101,
        temperature=temperature[place % 6],
    )


def _chosen(logits: torch.Tensor, specs: ChoiceSpecs, more: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [choose(logits, specs, **more)[0]]


def _chosen_on_host(logits: torch.Tensor, specs: ChoiceSpecs, more: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    names = ("seed_lo", "seed_hi", "choice", "position", "temperature")
    on_host = ChoiceSpecs(**{name: getattr(specs, name).cpu() for name in names})
    return _chosen(logits.cpu(), on_host, {name: tensor.cpu() for name, tensor in more.items()})


def _judged(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(judge(*arguments))


def _judged_on_host(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _judged([tensor.cpu() for tensor in arguments])


def _matched(texts: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    """Return the longest earlier matches of the ends of texts."""
    state: Any = SimpleNamespace(token_ids=texts, length=lengths)
    rows = torch.arange(len(texts), device=texts.device)
    return list(longest_matches(state, rows, Pointers(1, 8), texts.shape[1]))


def _matched_on_host(texts: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    return _matched(texts.cpu(), lengths.cpu())


def _hinted(texts: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    """Return the hints of texts to the first two guesses."""
    state = SimpleNamespace(token_ids=texts, length=lengths)
    rows: Any = SimpleNamespace(
        num_rows=len(texts), device=texts.device, on_device=state, max_len=texts.shape[1], verdict_sinks=[]
    )
    index = torch.arange(len(texts), device=texts.device)
    trail = LateHints(rows, RULE).begin(index, -(-texts.shape[1] // PAGE_TOKENS))
    first = trail.next(0, None)
    second = trail.next(1, index % 3)
    return [*first, *second]


def _hinted_on_host(texts: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    return _hinted(texts.cpu(), lengths.cpu())
