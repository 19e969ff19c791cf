"""Adapter of OpenVINO GenAI's continuous batching pipeline, step by step, on GGUF files."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.peers.protocol import PeerAnswers, PeerSetting, Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float32
    from numpy.typing import NDArray

CACHE_GB = 1
LOOKUP = 5, 3  # drafts, and largest n-gram: the values of its samples
SAVED = "openvino_model.xml"  # written beside the GGUF file with `enable_save_ov_model`


@dataclass(frozen=True, slots=True, eq=False)
class OpenVino:
    """A pipeline, and the same compiled model without a pipeline, for its logits."""

    genai: Any  # the module
    tensor: Any  # openvino.Tensor
    pipeline: Any
    compiled: Any
    lookup: bool  # prompt lookup decoding

    def describe(self) -> str:
        """Return the version and the types that the plugin chose."""
        names = ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "KV_CACHE_PRECISION", "INFERENCE_PRECISION_HINT")
        types = ", ".join(f"{name} {self.compiled.get_property(name)}" for name in names)
        return f"openvino-genai {version('openvino-genai')}: {types}"

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> PeerAnswers:
        """Continue all prompts at once, see `protocol.Peer`."""
        config = self.genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        if self.lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP
        recorder = Recorder(len(prompts))
        handles = [
            self.pipeline.add_request(row, self.tensor(np.array([ids], np.int64)), config)
            for row, ids in enumerate(prompts)
        ]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for row, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        recorder.add(row, list(output.generated_ids))
        return recorder.answers()

    def logits(self, token_ids: Sequence[int], num_judged: int) -> NDArray[float32]:
        """Return the logits [num_judged, vocab] that predict a text's last tokens."""
        ids = np.array([token_ids[:-1]], np.int64)
        request = self.compiled.create_infer_request()
        found = request.infer(
            {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "position_ids": np.arange(ids.size)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        logits: NDArray[float32] = next(iter(found.values()))[0]
        return logits[-num_judged:].copy()


def load(setting: PeerSetting, lookup: bool = False) -> OpenVino:
    """Load a GGUF file with its own weight types. lookup: use prompt lookup decoding."""
    genai, ov = import_module("openvino_genai"), import_module("openvino")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, False
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = setting.max_rows, setting.prefill_tokens
    properties = {"INFERENCE_NUM_THREADS": setting.threads}
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "model.gguf"
        shutil.copyfile(setting.file, copied)
        saving = properties | {"enable_save_ov_model": True} | ({"prompt_lookup": True} if lookup else {})
        pipeline = genai.ContinuousBatchingPipeline(str(copied), scheduler, "CPU", saving)
        compiled = ov.Core().compile_model(str(copied.with_name(SAVED)), "CPU", properties)
    return OpenVino(genai, ov.Tensor, pipeline, compiled, lookup)
