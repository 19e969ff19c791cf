"""Phase `plain`: passes and plain decoding of the target, against their floors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.backend.cuda.decoder import CudaDecoder
from tools.gpu.bench import EXACT, FAST, NUMERICS, load_decoder
from tools.gpu.engines import (
    decode_window,
    free_memory,
    kernel_share,
    load_target,
    make_engine,
    make_requests,
)
from tools.gpu.floors import pass_needs
from tools.gpu.passes import filled_kv, pages_of, static_pass
from tools.gpu.timing import captured, kernel_table, median_s

if TYPE_CHECKING:
    from paceline.backend.cuda.kv_store import DeviceKV
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig
    from tools.gpu.bench import GpuBench


def run(bench: GpuBench) -> None:
    """Time passes as graphs, then whole engines, then fp8 weights."""
    record, sizes = bench.record, bench.sizes
    found = record.attempt("load", load_target, bench, sizes.model, sizes.weights)
    if found is None:
        return
    config, loaded = found
    record.attempt("passes", _passes, bench, loaded)
    free_memory()
    for numerics in NUMERICS:
        mode = replace(config, numerics=numerics), replace(loaded, decoder=in_numerics(loaded.decoder, numerics))
        record.attempt(f"engine {numerics}", _engine, bench, numerics, *mode)
        free_memory()
    del found, loaded
    free_memory()
    record.attempt("fp8", _fp8, bench)


def in_numerics(decoder: Any, numerics: str) -> CudaDecoder:
    """Return a decoder with the same weights and other numerics."""
    setup = replace(decoder.setup, fast=numerics == FAST)
    return CudaDecoder(decoder.config, decoder.weights, setup)


# Passes -------------------------------------------------------------------------------------------


def _passes(bench: GpuBench, loaded: Loaded) -> None:
    """Time passes of rows, of several tokens, and of a prompt; list their kernels."""
    sizes, record = bench.sizes, bench.record
    exact, fast = (in_numerics(loaded.decoder, numerics) for numerics in NUMERICS)
    shapes = [(rows, 1, sizes.context) for rows in sizes.batches]
    shapes += [(1, new, sizes.context) for new in sizes.one_row]
    shapes += [(sizes.many_rows[0], new, sizes.context) for new in sizes.many_rows[1]]
    largest = max(rows * pages_of(context, new) for rows, new, context in shapes)
    kv = filled_kv(exact, max(largest, pages_of(0, sizes.prefill)))
    for name, decoder in ((EXACT, exact), (FAST, fast)):
        for shape in dict.fromkeys(shapes):
            what = f"pass {name} {shape[0]}x{shape[1]}"
            record.attempt(what, time_pass, bench, decoder, kv, shape, ("passes", name))
        record.attempt(f"prefill {name}", _prefill, bench, decoder, kv, name)
    for rows in sizes.profiled:
        record.attempt(f"kernels {rows}", _kernels, bench, exact, kv, rows)


def time_pass(
    bench: GpuBench,
    decoder: CudaDecoder,
    kv: DeviceKV,
    shape: tuple[int, int, int],
    path: tuple[str, ...],
) -> None:
    """Time one pass as a graph. shape: rows, tokens of each, tokens before them."""
    rows, new, context = shape
    work = captured(static_pass(decoder, kv, rows, new, context), bench.device)
    seconds = median_s(work, bench.device, bench.sizes.repeats)
    needs = pass_needs(decoder, kv, rows, new, context)
    floor_s = bench.floor_s(*needs)
    bench.record.put(
        *path,
        f"{rows}x{new}",
        ms=seconds * 1e3,
        floor_ms=floor_s and floor_s * 1e3,
        over_floor=floor_s and seconds / floor_s,
        bytes_per_s=needs.num_bytes / seconds,
        share_of_reads=_share(needs.num_bytes / seconds, bench.ceilings.get("read_bytes_per_s")),
    )


def _share(rate: float, ceiling: float | None) -> float | None:
    return rate / ceiling if ceiling else None


def _prefill(bench: GpuBench, decoder: CudaDecoder, kv: DeviceKV, numerics: str) -> None:
    """Time a pass over one prompt. Launched piece by piece, as such a pass is."""
    count = bench.sizes.prefill
    work = static_pass(decoder, kv, 1, count, 0, every=False)
    seconds = median_s(work, bench.device, max(bench.sizes.repeats // 5, 1))
    rate = pass_needs(decoder, kv, 1, count, 0, chosen=1).operations / seconds
    ceiling = bench.ceilings.get("matmul_per_s")
    bench.record.put("prefill", numerics, tokens=count, ms=seconds * 1e3, share_of_matmul=_share(rate, ceiling))


def _kernels(bench: GpuBench, decoder: CudaDecoder, kv: DeviceKV, rows: int) -> None:
    work = captured(static_pass(decoder, kv, rows, 1, bench.sizes.context), bench.device)
    bench.record.put("kernels", **{str(rows): kernel_table(work, bench.device)})


# Engines ------------------------------------------------------------------------------------------


def _engine(bench: GpuBench, numerics: str, config: EngineConfig, loaded: Loaded) -> None:
    """Time plain decoding through the engine at every batch."""
    sizes = bench.sizes
    engine = make_engine(config, loaded, "off", max(sizes.batches), sizes.context + sizes.answer)
    requests = make_requests(max(sizes.batches), sizes.context, sizes.answer, loaded.decoder.config.vocab_size)

    def one(rows: int) -> None:
        window = decode_window(engine, requests[:rows])
        bench.record.put("engine", numerics, rows, **window.summary())
        if numerics == EXACT:
            share = kernel_share(engine, requests[:rows], bench.device)
            bench.record.put("engine", numerics, rows, kernels_run=share)

    for rows in sizes.batches:
        bench.record.attempt(f"engine {numerics} {rows}", partial(one, rows))


def _fp8(bench: GpuBench) -> None:
    """Time passes with weights of 8 bits."""
    sizes = bench.sizes
    decoder = load_decoder(sizes.model, "fp8", bench.device)
    rows = sizes.batches[:1]
    kv = filled_kv(decoder, max(rows) * pages_of(sizes.context, 1))
    for count in rows:
        time_pass(bench, decoder, kv, (count, 1, sizes.context), ("passes", "fp8"))
