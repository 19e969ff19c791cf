"""Phase `speculation`: the table of vLLM's Dynamic SD proposal, by shape, at the proposal's acceptance.

The head's passes and the verification are real. What is drafted is a recording of plain decoding, spoilt at the
rates of the proposal's own run. Phase `pairs` does the same with draft models.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from tools.gpu.recorded import oracle
from tools.gpu.sizes import SEED_ACCEPTANCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.core.request_nouns import Request
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine
    from tools.gpu.bench import GpuBench

    Answers = Sequence[NDArray[int64]]

SHARE_K = 3  # drafts of a row while the share of time is measured in which kernels run


def run(bench: GpuBench) -> None:
    """Measure plain decoding, every K and `auto` at every batch."""
    sizes = bench.sizes
    measure_drafter(DraftStudy(bench, sizes.model, f"eagle3[model={sizes.head}]", sizes.batches, SEED_ACCEPTANCE))


@dataclass(frozen=True, slots=True)
class DraftStudy:
    """A target and a drafter that are to be measured."""

    bench: GpuBench
    model: str
    draft: str  # drafter, with its options in brackets
    batches: Sequence[int]
    acceptance: Sequence[float]  # share of drafts kept at each position
    path: tuple[str, ...] = ()  # of the results

    def engine(self, config: EngineConfig, loaded: Loaded, draft: str) -> Engine:
        """Make an engine for the largest batch."""
        sizes = self.bench.sizes
        return make_engine(config, loaded, draft, max(self.batches), sizes.context + sizes.answer)

    def time(self, way: str, engine: Engine, requests: Sequence[Request]) -> None:
        """Time a batch and note it; an error is noted, too."""

        def measure() -> None:
            window = decode_window(engine, requests)
            self.bench.record.put(*self.path, way, len(requests), **window.summary())

        self.bench.record.attempt(f"{way} {len(requests)}", measure)


def measure_drafter(study: DraftStudy) -> None:
    """Measure a drafter beside plain decoding."""
    bench, record, sizes = study.bench, study.bench.record, study.bench.sizes
    found = record.attempt(f"load {study.model}", load_target, bench, study.model, sizes.weights)
    if found is None:
        return
    vocab_size = found[1].decoder.config.vocab_size
    requests = make_requests(max(study.batches), sizes.context, sizes.answer, vocab_size)
    answers = record.attempt("plain", _plain, study, *found, requests)
    free_memory()
    if answers is not None:
        record.attempt("drafts", _drafts, study, *found, requests, answers)
        free_memory()


def _plain(study: DraftStudy, config: EngineConfig, loaded: Loaded, requests: Sequence[Request]) -> Answers:
    """Record the plain texts, and time plain decoding."""
    engine = study.engine(config, loaded, "off")
    answers = answer_all(engine, requests, len(requests))
    for rows in study.batches:
        study.time("off", engine, requests[:rows])
    return answers


def _drafts(
    study: DraftStudy, config: EngineConfig, loaded: Loaded, requests: Sequence[Request], answers: Answers
) -> None:
    """Time every K and `auto` with one engine, which has measured its costs."""
    path = study.bench.record.path.with_name(f"plain-{study.bench.record.phase}.jsonl")
    spec = oracle(path, answers, study.draft, max(study.bench.sizes.ks), study.acceptance)
    engine = study.engine(config, loaded, f"auto:{spec}")
    path.unlink()
    (name,) = engine.drafting.drafters
    auto = engine.controller
    study.bench.record.put(*study.path, drafter=study.draft, acceptance=list(study.acceptance))
    for rows in study.batches:
        for k in (0, *study.bench.sizes.ks):
            engine.controller = FixedK(name, k)
            study.time(f"k{k}", engine, requests[:rows])
        engine.controller = auto
        study.time("auto", engine, requests[:rows])
    engine.controller = FixedK(name, SHARE_K)
    middle = study.batches[len(study.batches) // 2]
    for rows in dict.fromkeys((study.batches[0], middle, study.batches[-1])):
        study.bench.record.attempt(f"kernels run {rows}", _kernels_run, study, engine, requests[:rows])


def _kernels_run(study: DraftStudy, engine: Engine, requests: Sequence[Request]) -> None:
    share = kernel_share(engine, requests, study.bench.device)
    study.bench.record.put(*study.path, "kernels_run", **{str(len(requests)): share})
