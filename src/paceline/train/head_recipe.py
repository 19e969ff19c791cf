"""EAGLE-3 and P-EAGLE heads in training: initial weights, predictions, files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.core.errors import UnsupportedModel
from paceline.model.files.hf import LAYER_NAMES
from paceline.model.heads.checkpoint import load_head
from paceline.model.heads.config import OWN_TOKENS, HeadConfig, head_shapes, read_config
from paceline.train.parallel_drafts import draft_in_parallel
from paceline.train.recipe import hash_of, inherit
from paceline.train.unroll import unroll

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig, Rope
    from paceline.train.batch import TrainBatch
    from paceline.train.drafts import DraftDepth
    from paceline.train.target_model import TrainTarget

DEVIATION = 0.02  # standard deviation of a new matrix
FIRST_NORM = 0.25  # times the target's norm: a new head's predictions are near uniform, not confidently wrong
_LAYER_OUTPUTS = ("attn_o", "mlp_down")  # matrices whose products a layer adds to the residual stream
_NORMS = {"fc_norm": True, "norm_output": True}
_FILE_NAMES = {"fc": "fc.weight", "norm": "norm.weight", "head": "lm_head.weight", "mask_hidden": "mask_hidden"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Settings of a head that the user chooses."""

    algorithm: str  # name in the `speculators` format
    architecture: str  # name in the `speculators` format
    num_layers: int
    num_steps: int
    taps: tuple[int, ...]
    mask_token_id: int | None = None
    own_tokens: bool = False  # trained to draft request tokens outside its vocabulary


class HeadRecipe:
    """A head over the target's hidden states, see `Recipe`."""

    num_frozen = 0

    def __init__(self, shape: HeadShape, target: TrainTarget, vocabulary: NDArray[int64], seed: int) -> None:
        """vocabulary: [draft_vocab] target ids, ascending."""
        self.num_steps = shape.num_steps
        self._values = config_json(shape, target, len(vocabulary))
        self._config = read_config(self._values, target.config)
        self._vocabulary = vocabulary
        self._target = target
        self.weights = first_weights(self._config, target, vocabulary, seed)
        self.inherited: set[str] = set()

    def output_rows(self, own_ids: torch.Tensor) -> torch.Tensor:
        """Return the head's output rows, and the target's rows of `own_ids`, see `Recipe`."""
        own = self.weights["head"]
        return torch.cat([own, self._target.head[own_ids]]) if len(own_ids) else own

    def predict(self, batch: TrainBatch, depths: Sequence[DraftDepth]) -> list[torch.Tensor]:
        """Run the head over all drafts, see `Recipe`."""
        embedded = self._target.embed[batch.token_ids]
        if self._config.mask_token_id is None:
            return unroll(self._config, self.weights, embedded, batch.tapped, batch.bounds, depths)
        mask = self._target.embed[self._config.mask_token_id]
        return draft_in_parallel(self._config, self.weights, embedded, mask, batch.tapped, batch.bounds, depths)

    def start_from(self, folder: Path) -> str:
        """Copy the weights that a trained head shares; return the hash of its file.

        Copies weights of equal name and shape, and output rows of tokens in both vocabularies. Weights that read
        taps need the same taps. So the trained head may be of other data or of the other algorithm. Layers that
        it lacks begin with zero output, so that its predictions are kept. Raises `ModelError`.
        """
        trained = load_head(folder, self._target.config)
        left = ("head",) if trained.config.taps == self._config.taps else ("head", "fc", "mask_hidden")
        others = {name: ours for name, ours in self.weights.items() if not name.startswith(left)}
        self.inherited = {"head", *inherit(others, trained.weights)}
        for name, ours in self.weights.items():
            if name not in self.inherited and name.endswith(_LAYER_OUTPUTS):
                ours.zero_()
        _, here, there = np.intersect1d(self._vocabulary, trained.token_ids, return_indices=True)
        ours = self.weights["head"]
        ours[here] = torch.tensor(trained.weights["head"][there], dtype=ours.dtype).to(ours.device)
        return hash_of(folder)

    def export(self) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
        """Return a folder of the `speculators` format, see `Recipe`."""
        tensors = {file_name(n): w for n, w in self.weights.items()}
        if "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
        return self._values, tensors | vocabulary_tensors(self._vocabulary, self._target.config.vocab_size)


def vocabulary_tensors(vocabulary: NDArray[int64], vocab_size: int) -> dict[str, torch.Tensor]:
    """Return `d2t`, offsets from draft to target ids, and `t2d`, the mask of draft tokens."""
    in_draft = np.zeros(vocab_size, bool)
    in_draft[vocabulary] = True
    return {"d2t": torch.from_numpy(vocabulary - np.arange(len(vocabulary))), "t2d": torch.from_numpy(in_draft)}


def file_name(name: str) -> str:
    """Return a tensor's name in the `speculators` format."""
    kind, _, path = name.partition(".")
    if kind == "layers":
        number, short = path.split(".")
        return f"layers.{number}.{ {**LAYER_NAMES, 'hidden_norm': 'hidden_norm.weight'}[short] }"
    return _FILE_NAMES.get(name, f"{name}.weight")


def config_json(shape: HeadShape, target: TrainTarget, draft_vocab_size: int) -> dict[str, Any]:
    """Return a head's config.json in the `speculators` format."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": shape.num_steps}
    optional = {} if shape.mask_token_id is None else {"mask_token_id": shape.mask_token_id}
    optional |= {OWN_TOKENS: True} if shape.own_tokens else {}
    return optional | {
        "architectures": [shape.architecture],
        "speculators_model_type": shape.algorithm,
        "speculators_config": {
            "algorithm": shape.algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": ["LlamaForCausalLM"]},
        },
        # vLLM 0.32 reads the norms of a P-EAGLE head inside this dictionary, those of an EAGLE-3 head outside.
        "transformer_layer_config": layer_json(target.config, shape.num_layers) | _NORMS,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target.config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "norm_before_residual": True,
        "norm_before_fc": False,
        **_NORMS,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }


def layer_json(target: ModelConfig, num_layers: int) -> dict[str, Any]:
    """Return the config.json of a head's layers, which have the target's shape."""
    return {
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": target.norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_context,
        "hidden_act": "silu",
        **rope_json(target.rope.of_head()),
    }


def rope_json(rope: Rope) -> dict[str, Any]:
    """Return the RoPE settings of config.json. Raises `UnsupportedModel` for factors in a tensor."""
    if rope.scaling == "factors":
        raise UnsupportedModel(
            "this GGUF keeps the target's RoPE settings as a tensor, and drafters for it cannot be written yet; "
            "name the same model in safetensors with --model"
        )
    scaling = {
        "none": None,
        "linear": {"rope_type": "linear", "factor": rope.factor},
        "llama3": {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        },
    }[rope.scaling]
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def first_weights(
    config: HeadConfig, target: TrainTarget, vocabulary: NDArray[int64], seed: int
) -> dict[str, torch.Tensor]:
    """Return an untrained head's weights; its output rows are the target's."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in head_shapes(config).items():
        if "norm" in name:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=random) * DEVIATION
    weights["norm"] = target.final_norm * FIRST_NORM
    weights["head"] = target.head[torch.from_numpy(vocabulary).to(target.head.device)]
    return {name: w.to(target.embed.device) for name, w in weights.items()}
