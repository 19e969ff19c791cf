"""Times on a device: medians by events, and work captured once and replayed."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Work = Callable[[], Any]

WARMUPS = 3


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(work: Work, device: torch.device, repeats: int) -> float:
    """Return the median seconds of some work on a device."""
    for _ in range(WARMUPS):
        work()
    synchronize(device)
    if device.type != "cuda":
        return median(_clocked(work) for _ in range(repeats))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]  # type: ignore[no-untyped-call]
    for start, end in events:
        start.record()
        work()
        end.record()
    synchronize(device)
    return float(median(start.elapsed_time(end) for start, end in events)) / 1e3


def mean_s(work: Work, device: torch.device, times: int) -> float:
    """Return the seconds of some work that is given again and again without waiting."""
    work()
    synchronize(device)
    start = perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (perf_counter() - start) / times


def _clocked(work: Work) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def captured(work: Work, device: torch.device) -> Work:
    """Return a replay of some work as one graph; on a host the work itself.

    The tensors of the work stay in place.
    """
    if device.type != "cuda":
        return work
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside), torch.inference_mode():
        for _ in range(2):  # compiles kernels and loads them
            work()
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        kept = work()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def kernel_table(work: Work, device: torch.device, times: int = 3, most: int = 16) -> list[dict[str, Any]]:
    """Return the kernels of some work, slowest first: launches and microseconds of a run."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    work()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(times):
            work()
        synchronize(device)
    rows = []
    for event in found.key_averages():
        spent_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        rows.append({"kernel": event.key[:80], "launches": event.count / times, "us": spent_us / times})
    total = sum(row["us"] for row in rows) or 1.0
    rows.sort(key=lambda row: -row["us"])
    return [{**row, "share": row["us"] / total} for row in rows[:most]]


def busy_share(work: Work, device: torch.device) -> float | None:
    """Return the share of time in which kernels ran; None on a host.

    The profiler slows the host down: with work that the host enqueues piece by piece, the share is a lower bound.
    """
    if device.type != "cuda":
        return None
    from torch.profiler import DeviceType, ProfilerActivity, profile

    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        synchronize(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    if not spans:
        return None
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return float(busy / max(until - spans[0][0], 1e-9))
