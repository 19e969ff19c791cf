"""Ceilings of a device, which every other figure is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tools.gpu.timing import captured, mean_s, median_s, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.gpu.bench import GpuBench

TIMES = 200  # launches or replays whose mean is taken


def run(bench: GpuBench) -> None:
    """Measure bandwidth, rate of products, launches and the gap between graphs."""
    record = bench.record
    for name, measure in (
        ("bandwidth", _bandwidth),
        ("matmul", _matmul),
        ("launch", _launch),
        ("graph gap", _graph_gap),
    ):
        record.attempt(name, measure, bench)
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        free, total = torch.cuda.mem_get_info(bench.device)
        record.put(
            "device",
            name=properties.name,
            processors=properties.multi_processor_count,
            l2_bytes=properties.L2_cache_size,
            free_bytes=free,
            total_bytes=total,
        )


def _bandwidth(bench: GpuBench) -> None:
    """Copy, counting bytes read and written; and only read, by the fastest reduction."""
    device, repeats, size = bench.device, bench.sizes.repeats, bench.sizes.copied_bytes
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device, repeats)
    rows = source.view(-1, 256)
    ones = torch.randn(256, device=device)
    reads: dict[str, Callable[[], torch.Tensor]] = {
        "sum": source.sum,
        "amax": source.amax,
        "sum of rows": lambda: rows.sum(1),
        "matrix times vector": lambda: rows @ ones,
    }
    read_s = {name: median_s(read, device, repeats) for name, read in reads.items()}
    best = min(read_s, key=lambda name: read_s[name])
    bench.record.put(copy_bytes_per_s=2 * size / copy_s, read_bytes_per_s=size / read_s[best], read_by=best)


def _matmul(bench: GpuBench) -> None:
    side, device = bench.sizes.square, bench.device
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = median_s(lambda: a @ b, device, bench.sizes.repeats)
    bench.record.put(matmul_per_s=2 * side**3 / seconds, matmul_side=side)


def _launch(bench: GpuBench) -> None:
    """Seconds of the host for one launch of PyTorch's, and of ours."""
    from paceline.backend.cuda.rowwise import rms_norm

    x = torch.randn(1, 4096, device=bench.device, dtype=bench.dtype)
    weight = torch.randn(4096, device=bench.device, dtype=bench.dtype)
    bench.record.put(
        launch_us=mean_s(lambda: x.add_(1), bench.device, TIMES) * 1e6,
        kernel_launch_us=mean_s(lambda: rms_norm(x, weight, 1e-5), bench.device, TIMES) * 1e6,
    )


def _graph_gap(bench: GpuBench) -> None:
    """Measure the time between two replays of a graph, beyond that between its kernels."""
    x = torch.randn(1 << 20, device=bench.device)

    def repeated(times: int) -> float:
        def work() -> None:
            for _ in range(times):
                x.mul_(1.0001)

        replay = captured(work, bench.device)
        return mean_s(replay, bench.device, TIMES)

    one_s, eleven_s = repeated(1), repeated(11)
    kernel_s = (eleven_s - one_s) / 10
    bench.record.put(graph_gap_us=max(one_s - kernel_s, 0.0) * 1e6, small_kernel_us=kernel_s * 1e6)
    synchronize(bench.device)
