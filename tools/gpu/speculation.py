"""Phase `speculation`: the table of the Dynamic SD proposal, by shape, at its acceptance.

The head's passes and the verification are real. What is drafted is a recording of plain decoding, spoilt at the
rates of the proposal's own run (`spoilt`). Phase `pairs` does the same with draft models.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.control.fixed import FixedK
from tools.gpu.engines import (
    answer_all,
    decode_window,
    free_memory,
    kernel_share,
    load_target,
    make_engine,
    make_requests,
)
from tools.gpu.sizes import SEED_ACCEPTANCE
from tools.gpu.spoilt import spoil

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import int64
    from numpy.typing import NDArray
    from tools.gpu.bench import GpuBench

    from paceline.core.nouns import Request
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine

    Answers = Sequence[NDArray[int64]]


def run(bench: GpuBench) -> None:
    """Measure plain decoding, every K and `auto` at every batch."""
    sizes = bench.sizes
    head = f"eagle3:model={sizes.head}"
    measure_drafter(bench, sizes.model, head, sizes.batches, SEED_ACCEPTANCE, ())


def measure_drafter(
    bench: GpuBench,
    model: str,
    draft: str,
    batches: Sequence[int],
    acceptance: Sequence[float],
    path: tuple[str, ...],
) -> None:
    """Measure a drafter beside plain decoding. path: of the results."""
    record, sizes = bench.record, bench.sizes
    found = record.attempt(f"load {model}", load_target, bench, model, sizes.weights)
    if found is None:
        return
    config, loaded = found
    requests = make_requests(max(batches), sizes.context, sizes.answer, loaded.decoder.config.vocab_size)
    answers = record.attempt("plain", _plain, bench, config, loaded, requests, batches, path)
    free_memory()
    if answers is not None:
        run_drafts = partial(_drafts, bench, config, loaded, draft, requests, batches, acceptance, path)
        record.attempt("drafts", run_drafts, answers)
        free_memory()


def _plain(
    bench: GpuBench,
    config: EngineConfig,
    loaded: Loaded,
    requests: Sequence[Request],
    batches: Sequence[int],
    path: tuple[str, ...],
) -> Answers:
    """Record the plain texts, and time plain decoding."""
    engine = make_engine(config, loaded, "off", max(batches), bench.sizes.context + bench.sizes.answer)
    answers = answer_all(engine, requests, len(requests))
    for rows in batches:
        bench.record.attempt(f"off {rows}", _time, bench, engine, requests[:rows], (*path, "off"))
    return answers


def _drafts(
    bench: GpuBench,
    config: EngineConfig,
    loaded: Loaded,
    draft: str,
    requests: Sequence[Request],
    batches: Sequence[int],
    acceptance: Sequence[float],
    path: tuple[str, ...],
    answers: Answers,
) -> None:
    """Time every K and `auto` with one engine, which has measured its costs."""
    sizes, record = bench.sizes, bench.record
    engine = make_engine(config, loaded, f"auto:{draft}", max(batches), sizes.context + sizes.answer)
    (name,) = engine.drafting.drafters
    auto = engine.controller
    spoil(engine, answers, acceptance)
    record.put(*path, drafter=name, acceptance=list(acceptance))
    for rows in batches:
        for k in (0, *sizes.ks):
            engine.controller = FixedK(name, k)
            record.attempt(f"k{k} {rows}", _time, bench, engine, requests[:rows], (*path, f"k{k}"))
        engine.controller = auto
        record.attempt(f"auto {rows}", _time, bench, engine, requests[:rows], (*path, "auto"))
    share = _shares(bench, engine, name, requests, path)
    for rows in (batches[0], batches[len(batches) // 2], batches[-1]):
        record.attempt(f"kernels run {rows}", share, rows)


def _shares(
    bench: GpuBench, engine: Engine, name: str, requests: Sequence[Request], path: tuple[str, ...]
) -> Callable[[int], None]:
    """Return a measurement of the share of time in which kernels run, with K = 3."""

    def one(rows: int) -> None:
        engine.controller = FixedK(name, 3)
        share = kernel_share(engine, requests[:rows], bench.device)
        bench.record.put(*path, "kernels_run", **{str(rows): share})

    return one


def _time(bench: GpuBench, engine: Engine, requests: Sequence[Request], path: tuple[str, ...]) -> None:
    window = decode_window(engine, requests)
    bench.record.put(*path, len(requests), **window.summary())
