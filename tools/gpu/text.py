"""Phase `text`: the same texts with speculation on and off, in every batch and with every chunk of prefill."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.control.fixed import FixedK
from tools.gpu.engines import answer_all, free_memory, load_target, make_engine, make_requests
from tools.gpu.sizes import SEED_ACCEPTANCE
from tools.gpu.spoilt import spoil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray
    from tools.gpu.bench import GpuBench

    from paceline.core.nouns import Request
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig

    Answers = Sequence[NDArray[int64]]

TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
MAX_LISTED = 10  # differences that are listed


def run(bench: GpuBench) -> None:
    """Answer the same requests in every way and compare token ids."""
    sizes, record = bench.sizes, bench.record
    found = record.attempt("load", load_target, bench, sizes.text_model, sizes.weights)
    if found is None:
        return
    config, loaded = found
    vocab_size = loaded.decoder.config.vocab_size
    requests = make_requests(sizes.requests, sizes.context, sizes.text_answer, vocab_size, TEMPERATURES)
    first = partial(_plain, bench, config, loaded, requests)
    plain = record.attempt("recording", first, sizes.text_chunks[0], max(sizes.text_batches))
    if plain is None:
        return
    record.put(requests=len(requests), tokens=sum(map(len, plain)), different_answers=0)
    for chunk in sizes.text_chunks:
        record.attempt(f"off, chunks of {chunk}", _compare_plain, bench, config, loaded, requests, plain, chunk)
        free_memory()
        record.attempt(f"drafts, chunks of {chunk}", _compare_drafts, bench, config, loaded, requests, plain, chunk)
        free_memory()


def _plain(
    bench: GpuBench, config: EngineConfig, loaded: Loaded, requests: Sequence[Request], chunk: int, batch: int
) -> Answers:
    length = bench.sizes.context + bench.sizes.text_answer
    engine = make_engine(config, loaded, "off", max(bench.sizes.text_batches), length, chunk)
    return answer_all(engine, requests, batch)


def _compare_plain(
    bench: GpuBench,
    config: EngineConfig,
    loaded: Loaded,
    requests: Sequence[Request],
    plain: Answers,
    chunk: int,
) -> None:
    for batch in bench.sizes.text_batches:
        if (chunk, batch) != (bench.sizes.text_chunks[0], max(bench.sizes.text_batches)):  # the recording itself
            answers = bench.record.attempt(
                f"off batch {batch} chunks {chunk}", _plain, bench, config, loaded, requests, chunk, batch
            )
            _count(bench, f"off batch {batch} chunks {chunk}", answers, plain)


def _compare_drafts(
    bench: GpuBench,
    config: EngineConfig,
    loaded: Loaded,
    requests: Sequence[Request],
    plain: Answers,
    chunk: int,
) -> None:
    sizes = bench.sizes
    length, rows = sizes.context + sizes.text_answer, max(sizes.text_batches)
    engine = make_engine(config, loaded, f"auto:eagle3:model={sizes.head}", rows, length, chunk)
    (name,) = engine.drafting.drafters
    auto = engine.controller
    spoil(engine, plain, SEED_ACCEPTANCE)
    for batch in sizes.text_batches:
        for label, controller in (("k1", FixedK(name, 1)), ("k3", FixedK(name, 3)), ("auto", auto)):
            engine.controller = controller
            engine.scheduler.pool.forget()  # prompts are computed anew, in chunks
            way = f"{label} batch {batch} chunks {chunk}"
            _count(bench, way, bench.record.attempt(way, answer_all, engine, requests, batch), plain)


def _count(bench: GpuBench, way: str, answers: Answers | None, plain: Answers) -> None:
    """Note which answers differ from the recording, and from which token on."""
    if answers is None:
        return
    pairs = enumerate(zip(answers, plain, strict=True))
    differ = [f"{i} from {_parting(a.tolist(), b.tolist())}" for i, (a, b) in pairs if a.tolist() != b.tolist()]
    total = bench.record.results["different_answers"] + len(differ)
    bench.record.put(different_answers=total)
    bench.record.put("ways", way, different=len(differ), first=differ[:MAX_LISTED])


def _parting(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
