"""Phase `compile`: kernels that the others launch, compiled in parallel into Triton's cache.

They are found without a device, by `tracing`. A process compiles a variant as a launch would, with stand-ins for
its arguments, so that a launch finds the code on disk.
"""

from __future__ import annotations

import multiprocessing
import re
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from paceline.backend.cuda.choice import choose
from paceline.backend.cuda.kernel_launch import ALIGNMENT, DESCRIPTOR, ELEMENTS, described
from paceline.backend.cuda.load import load_runner
from paceline.backend.cuda.output_matrix import wide_product
from paceline.core.system import usable_cores
from paceline.model.heads.checkpoint import load_head
from paceline.model.shapes import is_shape
from tools.gpu.bench import load_decoder
from tools.gpu.passes import pages_of, static_pass
from tools.gpu.right import all_checks
from tools.gpu.sweep import sweep_variants
from tools.gpu.tracing import H100_PROCESSORS, META, launches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.cuda.decoder import CudaDecoder
    from paceline.backend.cuda.kernel_launch import Variant
    from tools.gpu.bench import GpuBench
    from tools.gpu.record import Record
    from tools.gpu.sizes import Sizes

TYPES = {name: dtype for dtype, name in ELEMENTS.items()}
# Numbers of tokens and rows: passes of these launch every variant of a model's kernels.
TOKENS = (1, 2, 3, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 513, 4096)
ROWS = (1, 64, 600)
SLOW = ("product", "attend")  # begin names of variants that take longest
LAYERS = 4  # a head reads taps of the first three


def run(bench: GpuBench) -> None:
    """Compile what the phases need; without a GPU only find it."""
    record, on_gpu = bench.record, bench.device.type == "cuda"
    processors = _count_processors() if on_gpu else H100_PROCESSORS
    start = perf_counter()
    found: dict[str, Variant] = {}
    models = partial(trace_models, with_pairs="pairs" in bench.asked)
    for name, trace in (("checks", trace_checks), ("models", models)):
        found |= record.attempt(name, trace, bench.sizes, processors) or {}
    if "sweep" in bench.asked:
        found |= record.attempt("sweep", sweep_variants, bench.sizes) or {}
    record.put("found", variants=len(found), seconds=perf_counter() - start)
    if on_gpu:
        record.attempt("compile", _compile_all, list(found.values()), record)


# Finding them -------------------------------------------------------------------------------------


def trace_checks(sizes: Sizes, num_processors: int) -> dict[str, Variant]:
    """Return what phase `right` launches."""
    with launches(num_processors) as found:
        for check in all_checks(sizes, META):
            check.act()
    return found


def trace_models(sizes: Sizes, num_processors: int, *, with_pairs: bool) -> dict[str, Variant]:
    """Return what passes of targets, heads and draft models launch."""
    names = [(sizes.model, "bf16"), (sizes.model, "fp8")]
    pairs = sizes.pairs if with_pairs else ()
    for pair in pairs:
        names += [(pair.target, "bf16"), (pair.draft.rpartition("model=")[2].rstrip("]"), "bf16")]
    with launches(num_processors) as found:
        for model, weights in [(model, weights) for model, weights in names if is_shape(model)]:
            decoder = load_decoder(f"{model},num_layers={LAYERS}", weights, META)
            _trace_passes(decoder)
            if model == sizes.model:
                _trace_head(decoder, sizes.head)
    return found


def _trace_passes(decoder: CudaDecoder) -> None:
    """Run passes of every number of tokens and rows that has kernels of its own."""
    kv = decoder.new_kv(pages_of(0, 4096) * max(ROWS))
    for tokens in TOKENS:
        static_pass(decoder, kv, 1, tokens, 16)()
    for rows in ROWS:
        static_pass(decoder, kv, rows, 1, 512)()


def _trace_head(decoder: CudaDecoder, name: str) -> None:
    """Run passes of a head likewise."""
    head = load_head(Path(name), decoder.config)
    runner = load_runner(head, decoder, None, None)
    kv = runner.new_kv(pages_of(0, 4096) * max(ROWS))
    for rows, new in [(1, tokens) for tokens in TOKENS] + [(rows, 1) for rows in ROWS]:
        work = static_pass(decoder, decoder.new_kv(rows * pages_of(16, new)), rows, new, 16)
        taps = torch.empty(rows * new, head.config.tapped_size, dtype=torch.float16, device=META)
        first_keys = torch.zeros(rows, dtype=torch.int64, device=META)
        hidden = runner.run_layers(replace(work.tokens, first_keys=first_keys), runner.fuse(taps), kv)
        normed, _ = runner.read_out(hidden)
        choose(wide_product(normed, runner.output.matrix), work.specs, draft_ids=runner.output.tokens.ids)


# Compiling them -----------------------------------------------------------------------------------


def _compile_all(variants: Sequence[Variant], record: Record) -> None:
    """Compile in processes of their own, slow ones first; note what failed."""
    start = perf_counter()
    slow_first = sorted(variants, key=lambda v: not v.name.startswith(SLOW))
    failed: dict[str, str] = {}
    with _pool() as pool:
        pending = {pool.submit(_problem_of, variant): variant.name for variant in slow_first}
        done, left = wait(pending, timeout=record.left_s)
        for future in left:
            future.cancel()
        for future in done:
            if problem := str(future.exception() or future.result() or ""):
                failed[pending[future]] = problem
    record.put("compiled", variants=len(done) - len(failed), left=len(left), seconds=perf_counter() - start)
    record.put("compiled", failed=failed)


def _pool() -> ProcessPoolExecutor:
    """Return processes with all modules and no device: none may be shared with this one."""
    return ProcessPoolExecutor(len(usable_cores()), mp_context=multiprocessing.get_context("fork"))


def _problem_of(variant: Variant) -> str | None:
    """Compile a variant; return what went wrong, as errors do not pass between processes."""
    try:
        compile_variant(variant)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[-300:]
    return None


def _count_processors() -> int:
    with _pool() as pool:
        found: Future[int] = pool.submit(_processors_of_first)
        return found.result(timeout=60)


def _processors_of_first() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def compile_variant(variant: Variant) -> None:
    """Compile a variant as a launch of it does, or find it in Triton's cache."""
    arguments = [_stand_in(variant, name, kind) for name, kind in variant.arguments.items()]
    warm_up = partial(variant.load().warmup, *arguments, grid=(1,))
    warm_up(**variant.constants, **variant.options())


@dataclass(frozen=True, slots=True)
class _Pointer:
    """Stand-in for the tensor of a descriptor."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return an address that is aligned."""
        return 0


def _stand_in(variant: Variant, name: str, kind: str) -> Any:
    """Return an argument that the compiler takes for the real one."""
    if kind == "none":
        return None
    if kind.startswith(DESCRIPTOR):
        element, *block = re.findall(r"\w+", kind.removeprefix(DESCRIPTOR))
        return described(_Pointer(TYPES[element]), (1, ALIGNMENT), [int(size) for size in block])
    if kind.startswith("*"):
        return TYPES[kind[1:]]  # aligned; kernels do not ask of others whether they are
    if kind.startswith("i"):
        return ALIGNMENT if name in variant.aligned else ALIGNMENT + 1
    return 0.5
