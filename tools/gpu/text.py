"""Phase `text`: the same texts with drafts and without, in every batch and chunk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paceline.control.fixed import FixedK
from tools.gpu.engines import answer_all, free_memory, load_target, make_engine, make_requests
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

TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
MAX_K = 5  # drafts of a row, under `auto`
MAX_LISTED = 10  # differences that are listed


def run(bench: GpuBench) -> None:
    """Answer the same requests in every way and compare token ids."""
    sizes, record = bench.sizes, bench.record
    found = record.attempt("load", load_target, bench, sizes.text_model, sizes.weights)
    if found is None:
        return
    vocab_size = found[1].decoder.config.vocab_size
    requests = make_requests(sizes.requests, sizes.context, sizes.text_answer, vocab_size, TEMPERATURES)
    ways = TextWays(bench, *found, requests)
    plain = record.attempt("recording", ways.answer_plainly, sizes.text_chunks[0], max(sizes.text_batches))
    if plain is None:
        return
    record.put(requests=len(requests), tokens=sum(map(len, plain)), different_answers=0)
    for chunk in sizes.text_chunks:
        for name, compare in (("off", ways.compare_plain), ("drafts", ways.compare_drafts)):
            record.attempt(f"{name}, chunks of {chunk}", compare, chunk, plain)
            free_memory()


@dataclass(frozen=True, slots=True)
class TextWays:
    """Ways in which the same requests are answered."""

    bench: GpuBench
    config: EngineConfig
    loaded: Loaded
    requests: Sequence[Request]

    def _engine(self, draft: str, chunk: int) -> Engine:
        sizes = self.bench.sizes
        length, rows = sizes.context + sizes.text_answer, max(sizes.text_batches)
        return make_engine(self.config, self.loaded, draft, rows, length, chunk)

    def answer_plainly(self, chunk: int, batch: int) -> Answers:
        """Answer without drafts. chunk: prompt tokens computed in one step."""
        return answer_all(self._engine("off", chunk), self.requests, batch)

    def compare_plain(self, chunk: int, plain: Answers) -> None:
        """Compare plain decoding in other batches and chunks."""
        sizes = self.bench.sizes
        for batch in sizes.text_batches:
            if (chunk, batch) != (sizes.text_chunks[0], max(sizes.text_batches)):  # the recording itself
                self._compare(f"off batch {batch} chunks {chunk}", chunk, batch, plain, None)

    def compare_drafts(self, chunk: int, plain: Answers) -> None:
        """Compare decoding with drafts, of which some are kept."""
        sizes = self.bench.sizes
        path = self.bench.record.path.with_name("plain-text.jsonl")
        spec = oracle(path, plain, f"eagle3[model={sizes.head}]", MAX_K, SEED_ACCEPTANCE)
        engine = self._engine(f"auto:{spec}", chunk)
        path.unlink()
        (name,) = engine.drafting.drafters
        auto = engine.controller
        for batch in sizes.text_batches:
            for label, controller in (("k1", FixedK(name, 1)), ("k3", FixedK(name, 3)), ("auto", auto)):
                engine.controller = controller
                engine.scheduler.pool.forget()  # prompts are computed anew, in chunks
                self._compare(f"{label} batch {batch} chunks {chunk}", chunk, batch, plain, engine)

    def _compare(self, way: str, chunk: int, batch: int, plain: Answers, engine: Engine | None) -> None:
        """Note which answers differ from the recording. engine: None: a plain one."""
        answer = (
            partial(self.answer_plainly, chunk) if engine is None else partial(answer_all, engine, self.requests)
        )
        record = self.bench.record
        answers = record.attempt(way, answer, batch)
        if answers is None:
            return
        pairs = [(a.tolist(), b.tolist()) for a, b in zip(answers, plain, strict=True)]
        differ = [f"{i} from {_parting(a, b)}" for i, (a, b) in enumerate(pairs) if a != b]
        record.put(different_answers=record.results["different_answers"] + len(differ))
        record.put("ways", way, different=len(differ), first=differ[:MAX_LISTED])


def _parting(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
