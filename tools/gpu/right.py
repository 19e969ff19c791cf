"""Phase `right`: kernels against float64, and the same bits in every batch and replay."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from paceline.backend.cuda.kernel_launch import launch, uses_kernels, variant_table
from paceline.backend.cuda.matrix import Matrix
from paceline.backend.cuda.products import finished, kernel_product, multiply
from tools.gpu.attention_checks import (
    ALL_PARTS,
    ONE_PART,
    attention_case,
    attention_of,
    choices_of,
    writes_of,
)
from tools.gpu.bench import load_decoder
from tools.gpu.checks import MODEL_TYPES, Check, products_of, random_matrix, random_tokens, rowwise_of
from tools.gpu.passes import filled_kv, pages_of, static_pass
from tools.gpu.timing import captured
from tools.gpu.tracing import LAUNCHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.backend.cuda.kernel_launch import Variant
    from tools.gpu.bench import GpuBench
    from tools.gpu.sizes import Sizes

MAX_FAULTS = 40  # that are listed


def all_checks(sizes: Sizes, device: torch.device) -> Iterator[Check]:
    """Yield every check of a kernel against float64."""
    families = (products_of, rowwise_of, writes_of, attention_of, choices_of)
    return chain.from_iterable(family(sizes, device) for family in families)


def run(bench: GpuBench) -> None:
    """Check all kernels, then bits."""
    record = bench.record
    with _launched() as met:
        for family in (products_of, rowwise_of, writes_of, attention_of, choices_of):
            record.attempt(family.__name__, _against_float64, bench, family)
    record.put("variants", launched=len(met), never_launched=never_launched(met) if met else [])
    for name, compare in (
        ("bits of products", _product_bits),
        ("bits of attention", _attention_bits),
        ("bits of replays", _replay_bits),
        ("bits of a model", _model_bits),
    ):
        record.attempt(name, compare, bench)


def never_launched(met: set[str]) -> list[str]:
    """Return listed variants that are not among those met.

    Variants of older devices do not count, nor variants with PDL: a launch makes these from the ones without.
    """
    listed = {name for name, variant in variant_table().items() if not (variant.pdl or variant.before_hopper)}
    return sorted(listed - met)


@contextmanager
def _launched() -> Iterator[set[str]]:
    """Note the names of variants that are launched."""
    met: set[str] = set()

    def note(variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        met.add(variant.name)
        launch(variant, grid, *arguments)

    with ExitStack() as stack:
        for module in LAUNCHING:
            if hasattr(module, "launch"):
                stack.enter_context(patch.object(module, "launch", note))
        yield met


# Against float64 ----------------------------------------------------------------------------------


def _against_float64(bench: GpuBench, family: Callable[[Sizes, torch.device], Iterator[Check]]) -> None:
    worst, count, faults = 0.0, 0, []
    for check in family(bench.sizes, bench.device):
        if bench.record.left_s <= 0:
            faults.append("no time for the others")
            break
        with poisoned():
            got = check.act()
        error = _error(got, check.want())
        count += 1
        worst = max(worst, error / check.bound if check.bound else error)
        if not error <= check.bound:
            faults.append(f"{check.name}: {error:.2e}, more than {check.bound:.0e}")
    bench.record.put(
        "float64",
        family.__name__.removesuffix("_of"),
        checks=count,
        right=not faults,
        worst_of_bound=worst,
        faults=faults[:MAX_FAULTS],
    )


def _error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error of some tensors; infinity for NaN or other shapes."""
    worst = 0.0
    for ours, theirs in zip(got, want, strict=True):
        if ours.shape != theirs.shape:
            return float("inf")
        a, b = ours.double().to(theirs.device), theirs.double()
        error = ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
        worst = max(worst, float("inf") if math.isnan(error) else error)
    return worst


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill newly allocated outputs with NaN, or with numbers that no kernel computes."""
    originals = {name: getattr(torch, name) for name in ("empty", "empty_like")}
    new_empty = torch.Tensor.new_empty

    def filled(make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_meta or not tensor.numel():
            return tensor
        if tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(torch.nan if tensor.is_floating_point() else -77)
        return tensor

    def filled_new(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return filled(partial(new_empty, self), *args, **kwargs)

    with ExitStack() as stack:
        for name, make in originals.items():
            stack.enter_context(patch.object(torch, name, partial(filled, make)))
        stack.enter_context(patch.object(torch.Tensor, "new_empty", filled_new))
        yield


# Bits ---------------------------------------------------------------------------------------------


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare as bits, NaN and signs of 0 included."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _product_bits(bench: GpuBench) -> None:
    """Compare products of one token and of many, segments in parallel and in order."""
    sizes, device = bench.sizes, bench.device
    most = max(sizes.token_counts)
    for kind in MODEL_TYPES:
        for shape in sizes.matrices:
            m = random_matrix(shape, kind, device)
            x = random_tokens(most, m, kind)
            others = [count for count in sizes.token_counts if count > 1]
            batches = {str(count): _rows_alike(x[:count], m) for count in others}
            ways = [_ways_alike(x[:count], m) for count in sizes.token_counts] if uses_kernels(x) else None
            name = f"{kind} {shape[0]}x{shape[1]}"
            bench.record.put("bits", name, batches=batches, parallel_in_order=ways and all(ways))


def _rows_alike(x: torch.Tensor, m: Matrix) -> bool:
    whole = finished(multiply(x, m))
    places = sorted({0, len(x) // 2, len(x) - 1})
    return all(same_bits(whole[i : i + 1], finished(multiply(x[i : i + 1], m))) for i in places)


def _ways_alike(x: torch.Tensor, m: Matrix) -> bool:
    parallel, in_order = (finished(kernel_product(x, m, parallel=way)) for way in (True, False))
    return same_bits(parallel, in_order)


def _attention_bits(bench: GpuBench) -> None:
    """Compare tiles that are split and whole, and rows alone and in a batch."""
    rows = bench.sizes.rows
    for heads in bench.sizes.heads:
        for kv_type in ("bf16", "fp8"):
            case = attention_case(rows, heads, bench.dtype, kv_type, bench.device)
            (whole,), (split,) = case.attended(ALL_PARTS), case.attended(ONE_PART)
            alone = True
            for row in range(len(rows)):
                one, tokens = case.row_alone(row, rows)
                alone = alone and same_bits(one.attended()[0], whole[tokens])
            bench.record.put("bits", f"attend {heads} {kv_type}", split=same_bits(whole, split), alone=alone)


def _replay_bits(bench: GpuBench) -> None:
    """Compare replays of a graph of each kernel family with its first run."""
    sizes, device = bench.sizes, bench.device
    m = random_matrix(sizes.matrices[0], "bf16", device)
    x = random_tokens(sizes.token_counts[-1], m, "bf16")
    case = attention_case(sizes.rows, sizes.heads[0], bench.dtype, "bf16", device)
    for name, work in (("product", partial(multiply, x, m)), ("attend", partial(case.attended, ONE_PART))):
        first = _tensor(work()).clone()
        replay = captured(work, device)
        alike = sum(same_bits(first, _tensor(replay())) for _ in range(sizes.replays))
        bench.record.put("replays", **{name: f"{alike} of {sizes.replays}"})


def _tensor(result: Any) -> torch.Tensor:
    """Return the one tensor of a result."""
    if isinstance(result, list):
        return _tensor(result[0])
    found: torch.Tensor = getattr(result, "sums", result)
    return found


def _model_bits(bench: GpuBench) -> None:
    """Compare logits of a row alone, in a batch, and token by token."""
    sizes = bench.sizes
    weights = sizes.weights
    decoder = load_decoder(sizes.text_model, weights, bench.device)
    rows, new = sizes.many_rows[0], max(sizes.many_rows[1])
    kv = filled_kv(decoder, rows * pages_of(sizes.context, new))
    whole = _logits(static_pass(decoder, kv, rows, new, sizes.context))
    one_row = static_pass(decoder, kv, rows, new, sizes.context).row(rows - 1)
    alone = _logits(one_row)
    in_turn = torch.cat([_logits(one_row.token(i)) for i in range(new)])
    bench.record.put(
        "bits",
        "model",
        alone_and_in_a_batch=same_bits(whole[-new:], alone),
        together_and_in_turn=same_bits(alone, in_turn),
        largest_difference=(whole[-new:] - alone).abs().max().item(),
    )


def _logits(work: Any) -> torch.Tensor:
    hidden, _ = work.decoder.forward(work.tokens, work.kv)
    found: torch.Tensor = work.decoder.logits(hidden)
    return found
