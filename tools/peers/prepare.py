"""Input of the workers: the model in the form each reads, prompts, texts for quality."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from paceline.bench.interleave import make_questions
from paceline.bench.prompt_file import read_prompts, spread
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.core.params import SamplingParams
from paceline.model.config import num_weights
from paceline.model.files import hf
from paceline.model.files.gguf_file import open_gguf
from paceline.model.heads.config import OWN_TOKENS
from paceline.model.shapes import is_shape, read_shape
from paceline.model.weights import canonical_names, load_template, load_tokenizer
from paceline.serve.prompts import Prompts
from tools.measure.quality import load, log_probs, write_greedily
from tools.peers.remote import variables
from tools.peers.shape_gguf import write_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from paceline.model.config import ModelConfig
    from paceline.model.weights import LoadedModel
    from tools.measure.quality import QualityText
    from tools.peers.rows import PeerWorkload

    Update = Callable[[int, int], None]

ARCHITECTURES = {  # by family; the families that can be written for other engines
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
INDEX = "model.safetensors.index.json"
SPARE_SHARE = 0.1  # of a model's file, for matrices that are written in more bits than the rest


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder: two comparisons would remove each other's files from it. Raises `ConfigError`."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(held, folder)
        yield
    finally:
        os.close(held)


def _lock(held: int, folder: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another comparison works in {folder}: both would be slowed, so wait") from None


@contextmanager
def removed_at_end(folder: Path, *, keep: bool) -> Iterator[None]:
    """Remove the models and texts that a block puts into a folder; logs stay."""
    before = set(folder.iterdir()) if folder.is_dir() else set()
    try:
        yield
    finally:
        for path in () if keep or not folder.is_dir() else set(folder.iterdir()) - before:
            if path.is_dir() and (path / "config.json").is_file():
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix in {".gguf", ".part", ".npy"}:
                path.unlink(missing_ok=True)


def check_room(folder: Path, config: ModelConfig, kind: str) -> None:
    """Raise `ConfigError` if a disk has no room for a model in a type."""
    block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    needed = num_weights(config) * num_bytes / block * (1 + SPARE_SHARE)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"the model in {kind} takes {needed / 1e9:.1f} GB of {folder}, where {free / 1e9:.1f} GB are free: "
            "make room, choose fewer rows by --rows, or name another folder by --engines"
        )


def requantized(model: LoadedModel, folder: Path, python: Path, kind: str) -> Path:
    """Return the model in another GGUF type, made by llama.cpp's quantiser. Raises `UnsupportedModel`."""
    target = folder / f"{kind}.gguf"
    if not target.is_file():
        check_room(folder, model.config, kind)
        command = [str(python), "-m", "tools.peers.requantize", str(model.path), str(target), kind]
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, errors="replace", env=os.environ | variables(), check=False
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise UnsupportedModel(f"llama.cpp cannot write {kind}: {last[0][:200]}")
    return target


def unquantized(model: LoadedModel, folder: Path) -> Path:
    """Return the model as a Hugging Face folder in float32, without a tokenizer. Raises `UnsupportedModel`.

    A file holds one layer's tensors, so that no more than these are in memory.
    """
    target = folder / "float32"
    if not (target / INDEX).is_file():
        config = config_json(model.config)
        check_room(folder, model.config, "F32")
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        names = canonical_names(model.config, hf.MODEL_NAMES, hf.LAYER_NAMES, hf.LAYER_PREFIX)
        places: dict[str, str] = {}
        for part, here in groupby(names, lambda name: ".".join(name.split(".")[:-1]) or name):
            file = f"model-{part}.safetensors"
            tensors = {names[n]: np.ascontiguousarray(model.weights[n], np.float32) for n in here}
            save_file(tensors, target / file, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, file)
        (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    return target


def unquantized_head(head: Path, folder: Path) -> Path:
    """Return a float32 copy of a head.

    It is without the request's own tokens, which only Paceline knows.
    """
    target = folder / "head"
    target.mkdir(parents=True, exist_ok=True)
    stored = load_file(head / "model.safetensors")
    tensors = {}
    for name, tensor in stored.items():
        if not name.endswith("_scale"):
            scaled = tensor * stored[f"{name}_scale"] if f"{name}_scale" in stored else tensor
            tensors[name] = scaled.astype(np.float32) if np.issubdtype(scaled.dtype, np.floating) else scaled
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    values = hf.read_json(head / "config.json") | {"dtype": "float32"}
    for key in ("quantization_config", OWN_TOKENS):
        values.pop(key, None)
    (target / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    return target


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a dense model, the inverse of `hf.config_from_json`. Raises `UnsupportedModel`."""
    architecture = ARCHITECTURES.get(config.family)
    if architecture is None or config.rope.scaling != "none" or config.biases != config.facts.biases:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"only {known} with plain RoPE are written as a Hugging Face folder")
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }


def prompts_of(
    model: LoadedModel, file: str, workloads: Sequence[PeerWorkload], repeat: int
) -> dict[str, list[list[list[int]]]]:
    """Return the prompts [num_rows][prompt_tokens] of each run of each workload.

    They are beginnings of the texts that are long enough, shuffled; each run takes the next ones. Raises
    `ConfigError` if no text is long enough.
    """
    tokenizer = load_tokenizer(model)
    texts = [tokenizer.encode(p.text) for p in read_prompts(file)]
    random.Random(0).shuffle(texts)  # noqa: S311 (a fixed order, not a secret)
    prompts: dict[str, list[list[list[int]]]] = {}
    for w in workloads:
        fitting = [list(ids[: w.prompt_tokens]) for ids in texts if len(ids) >= w.prompt_tokens]
        if not fitting:
            raise ConfigError(f"--prompts: no text has {w.prompt_tokens} tokens")
        prompts[w.name] = [
            [fitting[(run * w.num_rows + row) % len(fitting)] for row in range(w.num_rows)]
            for run in range(w.num_runs(repeat))
        ]
    return prompts


def chat_prompts(model: LoadedModel, file: str, limit: int) -> list[list[int]]:
    """Return `limit` prompts through the chat template, evenly spread over the file. [prompt][token] ids"""
    encode = Prompts(load_tokenizer(model), load_template(model), model.config.max_context)
    questions = make_questions(spread(read_prompts(file), limit), encode, SamplingParams(max_tokens=1), 0)
    return [list(q.request.prompt_ids) for q in questions]


@dataclass(frozen=True, slots=True)
class JudgedTexts:
    """Texts, and the float32 log-probabilities of their last tokens."""

    texts: list[list[int]]
    expected: Path  # .npy, log-probabilities [num_texts, num_tokens, vocab] float32


def judged_texts(
    model: LoadedModel, file: str, limit: int, num_tokens: int, target: Path, update: Update
) -> JudgedTexts:
    """Write greedy float32 answers to `limit` prompts, and save their distributions, as `measure.quality` does."""
    asked = chat_prompts(model, file, limit)
    answers = _written(model, asked, num_tokens, update)
    reference = load(model, "reference", "f32", "f32", None)
    np.save(target, np.stack([log_probs(reference, a).astype(np.float32) for a in answers]))
    return JudgedTexts([list(a.token_ids) for a in answers], target)


def _written(
    model: LoadedModel, asked: Sequence[Sequence[int]], num_tokens: int, update: Update
) -> list[QualityText]:
    """Return greedy float32 answers; the decoder that writes them is gone when this returns."""
    writer = load(model, "native", "f32", "f32", None)
    answers = []
    for done, prompt_ids in enumerate(asked):
        update(done, len(asked))
        answers.append(write_greedily(writer, tuple(prompt_ids), num_tokens))
    return answers


def file_type(model: LoadedModel) -> str:
    """Return the type that most bytes of a model's file have."""
    if model.path.suffix != ".gguf":
        return "safetensors"
    sizes: Counter[str] = Counter()
    for tensor in open_gguf(model.path).tensors.values():
        sizes[tensor.quant.name] += tensor.num_bytes
    return sizes.most_common(1)[0][0]


def model_file(name: str, folder: Path, kind: str) -> str:
    """Return a model's name, or a shape's GGUF file, written once. Raises `UnsupportedModel`."""
    if not is_shape(name):
        return name
    target = folder / f"{''.join(ch if ch.isalnum() else '-' for ch in name)}-{kind}.gguf"
    if not target.is_file():
        check_room(folder, read_shape(name).config, kind)
        write_shape(name, target, kind)
    return str(target)
