"""Tiny random checkpoints with an MTP layer, in each kind of names that is in use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.model.families import GLM_MOE, SMALL, disturb
from tests.tiny import tiny_raw_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")

SHARP = 0.35  # of random weights: greedy texts that wander
# Kind -> prefix of the classes in transformers, changes of the config there, `model_type`, prefix of MTP tensors.
KINDS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "mimo": ("Qwen2", {}, "mimo", "model.mtp_layers.0."),
    "glm": ("Glm4Moe", {**GLM_MOE, "attention_bias": True}, "glm4_moe", "model.layers.4."),
    "glm, normed heads": ("Glm4Moe", {**GLM_MOE, "use_qk_norm": True}, "glm4_moe", "model.layers.4."),
    "qwen": ("Qwen3", {}, "qwen3", "mtp."),
}
OF_NAMES = {"mimo": "mimo", "qwen": "qwen"}  # kind -> that of `tests/oracles/mtp.py`, if not "glm"
BESIDE = {
    "glm": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "mimo": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    "qwen": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
}


def names_of(kind: str) -> str:
    return OF_NAMES.get(kind, "glm")


def write_checkpoint(folder: Path, kind: str, *, with_mtp: bool = True) -> dict[str, np.ndarray]:
    """Write a model's folder; return the tensors of its MTP layer without their prefix."""
    classes, changes, model_type, prefix = KINDS[kind]
    torch.manual_seed(7)
    # The width is one that rows of four bits can be spread over.
    small = SMALL | {"hidden_size": 64, "pad_token_id": None, "initializer_range": SHARP, "eos_token_id": None}
    config = getattr(transformers, f"{classes}Config")(**(small | {"tie_word_embeddings": False} | changes))
    model = getattr(transformers, f"{classes}ForCausalLM")(config).eval()
    disturb(model)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tiny_raw_tokenizer(320).to_str())
    values = json.loads((folder / "config.json").read_text())
    values |= {"model_type": model_type, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(values))
    tensors = load_file(folder / "model.safetensors")
    own = mtp_tensors(kind, tensors)
    if with_mtp:
        more = {prefix + name: tensor for name, tensor in own.items()}
        if names_of(kind) == "glm":  # such files repeat the target's tables
            more[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
            more[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].copy()
        save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    return own


def mtp_tensors(kind: str, target: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a random layer shaped as the target's last one."""
    random, last = np.random.default_rng(3), "model.layers.3."
    inner = "layers.0." if kind == "qwen" else ""
    shapes = {inner + n.removeprefix(last): t.shape for n, t in target.items() if n.startswith(last)}
    width = target["model.norm.weight"].shape[0]
    fc, *norms = BESIDE[names_of(kind)]
    shapes |= {f"{fc}.weight": (width, 2 * width)} | {f"{name}.weight": (width,) for name in norms}
    return {
        name: (SHARP * random.standard_normal(shape) + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }
