"""Phase `peers`: other engines over the same shape, on the same device and run.

They are a compiled loop with a static cache, and the continuous batching and assisted generation of transformers.
The library uses PyTorch's own attention unless flash-attention is installed, which its makers measure as several
times faster.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.model.weights import load_model
from tools.gpu.engines import free_memory, make_requests
from tools.gpu.recorded import chances_of
from tools.gpu.sizes import SEED_ACCEPTANCE
from tools.gpu.static_loop import StaticLoop
from tools.gpu.timing import captured, mean_s, synchronize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.model.config import ModelConfig
    from tools.gpu.bench import GpuBench

ASSISTED_K = 3


def run(bench: GpuBench) -> None:
    """Measure the peers, those that compile for long last."""
    record, sizes = bench.record, bench.sizes
    config = load_model(sizes.model).config
    for rows in sizes.loop_batches:
        _attempt_loop(bench, config, rows, compiled=False)
    record.attempt("transformers", _library, bench, config)
    free_memory()
    for rows in sizes.loop_batches:
        _attempt_loop(bench, config, rows, compiled=True)


def _attempt_loop(bench: GpuBench, config: ModelConfig, rows: int, compiled: bool) -> None:
    if not compiled or bench.device.type == "cuda":
        name = f"{'compiled' if compiled else 'plain'} loop {rows}"
        bench.record.attempt(name, _loop, bench, config, rows, compiled)
        free_memory()


def _library(bench: GpuBench, config: ModelConfig) -> None:
    model = _library_model(bench, config)
    for rows in bench.sizes.library_batches:
        bench.record.attempt(f"continuous batching {rows}", _continuous, bench, model, rows)
        free_memory()
    bench.record.attempt("assisted generation", _assisted, bench, model)


# A static cache ------------------------------------------------------------------------------------


def _loop(bench: GpuBench, config: ModelConfig, rows: int, compiled: bool) -> None:
    sizes, start = bench.sizes, perf_counter()
    loop = StaticLoop(config, rows, sizes.context + sizes.answer, bench.device)
    step = captured(loop.stepper(compiled=compiled), bench.device)
    made_s = perf_counter() - start
    loop.start(sizes.context)
    seconds = mean_s(step, bench.device, sizes.answer // 2)
    name = "compiled loop" if compiled else "plain loop"
    bench.record.put(name, rows, tpot_ms=seconds * 1e3, tokens_per_s=rows / seconds, made_s=made_s)


# transformers --------------------------------------------------------------------------------------


def _library_model(bench: GpuBench, c: ModelConfig) -> Any:
    """Return a random model of transformers' of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=bench.device).eval()
    with torch.inference_mode():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_(0.0, 0.02)
        rope = model.model.rotary_emb  # which `to_empty` has emptied
        rope.inv_freq.copy_(10000.0 ** (-torch.arange(0, c.head_dim, 2, device=bench.device) / c.head_dim))
    return model


def _generation(answer: int, **more: Any) -> Any:
    from transformers import GenerationConfig

    config: Any = GenerationConfig
    return config(max_new_tokens=answer, do_sample=False, eos_token_id=None, pad_token_id=0, **more)


def _prompts(bench: GpuBench, model: Any, rows: int) -> list[list[int]]:
    requests = make_requests(rows, bench.sizes.context, 1, model.config.vocab_size)
    return [list(request.prompt_ids) for request in requests]


def _continuous(bench: GpuBench, model: Any, rows: int) -> None:
    """Time tokens from when all requests have their first until one request ends."""
    found = model.generate_batch(
        inputs=_prompts(bench, model, rows),
        generation_config=_generation(bench.sizes.answer),
        record_timestamps=True,
        **_batching(bench),
    )
    times = [output.timestamps for output in found.values()]
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    tokens = sum(start < at <= end for t in times for at in t)
    if not tokens:
        raise RuntimeError("at no time did all rows decode")
    rate = tokens / (end - start)
    bench.record.put("continuous batching", rows, tpot_ms=rows / rate * 1e3, tokens_per_s=rate)


def _batching(bench: GpuBench) -> dict[str, Any]:
    """Return options of batching: on a host, little memory."""
    if bench.device.type == "cuda":
        return {}
    from transformers import ContinuousBatchingConfig

    return {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)}


class RecordedCandidates:
    """Drafts of a recording, spoilt at some rates; see `CandidateGenerator` of transformers."""

    requires_model_outputs = False

    def __init__(self, recorded: torch.Tensor, k: int, chances: Sequence[float], vocab_size: int) -> None:
        """recorded: [num_tokens] prompt and plain answer."""
        self._recorded, self._k, self._vocab_size = recorded, k, vocab_size
        self._chances = torch.tensor(chances[:k])
        self._uniform = torch.from_numpy(np.random.default_rng(3).random(len(recorded) + k)).float()

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Return the tokens so far with up to k drafts behind them."""
        start = input_ids.shape[1]
        right = self._recorded[start : start + self._k]
        count = max(min(self._k, len(self._recorded) - start - 1), 0)
        kept = self._uniform[start : start + count] < self._chances[:count]
        drafts = torch.where(kept.to(right.device), right[:count], (right[:count] + 1) % self._vocab_size)
        return torch.cat([input_ids, drafts[None]], 1), None

    def update_candidate_strategy(self, *_: Any, **__: Any) -> None:
        """Learn nothing."""


def _assisted(bench: GpuBench, model: Any) -> None:
    """Time plain and assisted generation. Drafts cost nothing, and `SEED_ACCEPTANCE` says how many are kept."""
    sizes = bench.sizes
    ids = torch.tensor(_prompts(bench, model, 1), device=bench.device)
    mask = torch.ones_like(ids)

    def timed(answer: int, **more: Any) -> tuple[float, torch.Tensor]:
        synchronize(bench.device)
        start = perf_counter()
        found: torch.Tensor = model.generate(
            ids, attention_mask=mask, generation_config=_generation(answer, **more)
        )
        synchronize(bench.device)
        return perf_counter() - start, found

    few = max(sizes.answer // 4, 2)
    plain_s, recorded = timed(sizes.answer)
    gaps = sizes.answer - few
    bench.record.put("generate", 1, tpot_ms=(plain_s - timed(few)[0]) / gaps * 1e3)
    make = partial(
        RecordedCandidates, recorded[0], ASSISTED_K, chances_of(SEED_ACCEPTANCE), model.config.vocab_size
    )
    model._get_candidate_generator = lambda **_: make()
    options = {"prompt_lookup_num_tokens": ASSISTED_K}
    assisted_s = timed(sizes.answer, **options)[0] - timed(few, **options)[0]
    bench.record.put("assisted generation", 1, k=ASSISTED_K, tpot_ms=assisted_s / gaps * 1e3, free_drafts=True)
