"""Engines by shape, timed while all of their rows decode."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.bench.interleave import cancel_all
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from tools.gpu.bench import BACKEND, EXACT
from tools.gpu.timing import busy_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.engine.assembly.build import Loaded
    from paceline.engine.engine import Engine
    from tools.gpu.bench import GpuBench

WARM_STEPS = 6  # steps that are not timed, after every row has its first token
BUSY_STEPS = 12  # steps under the profiler
SPARE = 32  # tokens of room behind the last token of an answer, for drafts
STALL_RATIO, STALL_S = 3.0, 0.003  # a step of more than 3 medians and 3 ms is a stall
LEAST_STEPS = 3  # fewest steps of a window


def load_target(bench: GpuBench, model: str, weights: str, numerics: str = EXACT) -> tuple[EngineConfig, Loaded]:
    """Load a model by shape, and return the config it was loaded by."""
    config = EngineConfig(
        model=model,
        backend=BACKEND,
        device=str(bench.device),
        weights=weights,
        numerics=numerics,
        draft="off",
    )
    return config, build.load(config)


def make_engine(
    config: EngineConfig, loaded: Loaded, draft: str, num_rows: int, max_len: int, prefill_tokens: int = 4096
) -> Engine:
    """Make an engine with KV for all its rows."""
    limits = Limits(num_rows, max_len + SPARE, prefill_tokens, 1 << 24)
    kv_tokens = num_rows * (max_len + SPARE + 16)
    own = replace(config, draft=draft, limits=limits, kv_tokens=kv_tokens)
    return build.assemble(own, loaded).engine


def free_memory() -> None:
    """Give back what dropped engines and models held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_requests(
    count: int, context: int, answer: int, vocab_size: int, temperatures: Sequence[float] = (0.0,)
) -> list[Request]:
    """Return requests 0, 1, ... with random prompts of `context` tokens, no two alike."""
    chance = np.random.default_rng(7)
    prompts = chance.integers(3, vocab_size - 1, (count, context))
    return [
        Request(
            str(index),
            tuple(prompt),
            SamplingParams(
                temperature=temperatures[index % len(temperatures)], max_tokens=answer, ignore_eos=True
            ),
            seed=1000 + index,
        )
        for index, prompt in enumerate(prompts.tolist())
    ]


def answer_all(engine: Engine, requests: Sequence[Request], at_once: int) -> list[NDArray[int64]]:
    """Return the answers to all requests, `at_once` in flight."""
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting = list(reversed(requests))
    open_ids: set[str] = set()
    while waiting or engine.has_work:
        while waiting and len(open_ids) < at_once:
            request = waiting.pop()
            engine.add(request)
            open_ids.add(request.request_id)
        for outcome in engine.step():
            found[outcome.request_id] += outcome.token_ids
            if outcome.finish_reason is not None:
                open_ids.discard(outcome.request_id)
    return [np.array(found[request.request_id], np.int64) for request in requests]


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of an engine while all its rows decoded."""

    rows: int
    steps_s: tuple[float, ...]  # time of each step
    step_tokens: tuple[int, ...]  # tokens that came with it
    accepted: int
    verified: int
    k_histogram: tuple[int, ...]
    draft_ms: float  # of the host in drafters, per step
    target_ms: float  # of passes, per step
    host_ms: float

    def summary(self) -> dict[str, Any]:
        """Return the figures without stalled steps, such as one in which a graph is captured."""
        longest = STALL_RATIO * median(self.steps_s) + STALL_S
        counted = [(s, tokens) for s, tokens in zip(self.steps_s, self.step_tokens, strict=True) if s <= longest]
        seconds, tokens, steps = sum(s for s, _ in counted), sum(tokens for _, tokens in counted), len(counted)
        return {
            "tpot_ms": self.rows * seconds / max(tokens, 1) * 1e3,
            "step_ms": seconds / steps * 1e3,
            "step_p50_ms": median(self.steps_s) * 1e3,
            "tokens_per_s": tokens / seconds,
            "tokens_per_step_and_row": tokens / (steps * self.rows),
            "steps": steps,
            "stalls": len(self.steps_s) - steps,
            "stalled_ms": (sum(self.steps_s) - seconds) * 1e3,
            "accepted": self.accepted,
            "verified": self.verified,
            "k_histogram": list(self.k_histogram),
            "draft_ms": self.draft_ms,
            "target_ms": self.target_ms,
            "host_ms": self.host_ms,
        }


def decode_window(engine: Engine, requests: Sequence[Request]) -> Window:
    """Answer all requests at once until one ends; return the figures while all decoded."""
    begin_all(engine, requests)
    for _ in range(WARM_STEPS):
        engine.step()
    before, start = engine.stats(), perf_counter()
    steps_s, step_tokens, ended = [], [], False
    while not ended:
        outcomes = engine.step()
        end = perf_counter()
        steps_s.append(end - start)
        step_tokens.append(sum(len(outcome.token_ids) for outcome in outcomes))
        start, ended = end, any(outcome.finish_reason is not None for outcome in outcomes)
    done = engine.stats().since(before)
    cancel_all(engine, [request.request_id for request in requests])
    if len(steps_s) <= LEAST_STEPS:
        raise RuntimeError(f"all {len(requests)} rows decoded in {len(steps_s)} steps only: answers are too short")
    per_step = 1e3 / max(done.steps, 1)
    counts = list(done.drafters.values())
    return Window(
        rows=len(requests),
        steps_s=tuple(steps_s[:-1]),  # without the one that ended a request
        step_tokens=tuple(step_tokens[:-1]),
        accepted=sum(c.accepted for c in counts),
        verified=sum(c.verified for c in counts),
        k_histogram=tuple(done.k_histogram),
        draft_ms=done.draft_s * per_step,
        target_ms=done.target_s * per_step,
        host_ms=done.host_s * per_step,
    )


def begin_all(engine: Engine, requests: Sequence[Request]) -> None:
    """Add requests and take steps until each has its first token."""
    for request in requests:
        engine.add(request)
    waiting = {request.request_id for request in requests}
    while waiting:
        for outcome in engine.step():
            if outcome.finish_reason is not None:
                raise RuntimeError(
                    f"a request ended before all had begun: {outcome.error or outcome.finish_reason}"
                )
            if outcome.token_ids:
                waiting.discard(outcome.request_id)


def kernel_share(engine: Engine, requests: Sequence[Request], device: torch.device) -> float | None:
    """Return the share of time in which kernels run; None on a host."""
    if device.type != "cuda":
        return None
    begin_all(engine, requests)

    def some_steps() -> None:
        for _ in range(BUSY_STEPS):
            engine.step()

    share = busy_share(some_steps, device)
    cancel_all(engine, [request.request_id for request in requests])
    return share
