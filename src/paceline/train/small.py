"""A draft model in training: some of the target's layers, its own tables, a reduced vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from paceline.backend.reference.decoder import ACTIVATIONS, linear, rms_norm
from paceline.backend.rope import cos_sin, inverse_frequencies, rotate
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.model.config import layer_shapes
from paceline.model.files import hf
from paceline.model.heads.cut_model import SHARED, load_cut_model
from paceline.train.export import hash_of
from paceline.train.head import file_name, rope_json, vocabulary_tensors
from paceline.train.recipe import take_over

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.train.batch import TrainBatch
    from paceline.train.drafts import Bounds, Depth
    from paceline.train.target import TrainTarget

    Layer = dict[str, torch.Tensor]


class SmallRecipe:
    """A copy of chosen target layers with a final norm of its own; embedding and head stay the target's."""

    num_steps = 1  # every guess follows true tokens

    def __init__(self, layers: Sequence[int], target: TrainTarget, vocabulary: NDArray[int64]) -> None:
        """layers: of the target, in this order. vocabulary: [draft_vocab] target ids, ascending."""
        if target.config.sliding is not None or target.config.facts.sandwich_norms:
            raise UnsupportedModel("draft models are cut from targets whose layers see all tokens; train a head")
        self._target = target
        self._layers = layers
        self._vocabulary = vocabulary
        self.taken_over: set[str] = set()
        device = target.embed.device
        inverse = inverse_frequencies(target.config.rope, target.config.head_dim)
        self._inverse = torch.from_numpy(inverse).to(device)
        self._head = target.head[torch.from_numpy(vocabulary).to(device)]
        self.weights = {"norm": target.final_norm.clone()}
        for number, theirs in enumerate(layers):
            for name in layer_shapes(target.config):
                copied = torch.tensor(target.model.weights[f"layers.{theirs}.{name}"], dtype=torch.float32)
                self.weights[f"layers.{number}.{name}"] = copied.to(device)

    def written(self, own_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's rows, see `Recipe`."""
        return torch.cat([self._head, self._target.head[own_ids]]) if len(own_ids) else self._head

    def guess(self, batch: TrainBatch, depths: Sequence[Depth]) -> list[torch.Tensor]:
        """Return what stands at each entry, the same at every depth, see `Recipe`."""
        config = self._target.config
        places = torch.cat([torch.arange(b.end - b.start) for b in batch.bounds]).to(self._head.device)
        turns = cos_sin(places, self._inverse, self._head.dtype)
        hidden = self._target.embed[batch.token_ids]
        for number in range(len(self._layers)):
            prefix = f"layers.{number}."
            layer = {n.removeprefix(prefix): w for n, w in self.weights.items() if n.startswith(prefix)}
            normed = rms_norm(hidden, layer["attn_norm"], config.norm_eps)
            hidden = hidden + linear(layer, "attn_o", self._attend(layer, normed, turns, batch.bounds))
            normed = rms_norm(hidden, layer["mlp_norm"], config.norm_eps)
            gate = ACTIVATIONS[config.facts.activation](linear(layer, "mlp_gate", normed))
            hidden = hidden + linear(layer, "mlp_down", gate * linear(layer, "mlp_up", normed))
        normed = rms_norm(hidden, self.weights["norm"], config.norm_eps)
        return [normed[depth.anchors + number] for number, depth in enumerate(depths)]

    def start_from(self, folder: Path) -> str:
        """Take over the layers and the norm of a trained draft model, see `Recipe`."""
        trained = load_cut_model(folder, self._target.config).weights
        self.taken_over = take_over(self.weights, {**trained, "norm": trained["final_norm"]})
        return hash_of(folder)

    def export(self) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
        """Return a folder that `draft/small` reads, see `Recipe`."""
        c = self._target.config
        values = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": c.family,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "num_hidden_layers": len(self._layers),
            "rms_norm_eps": c.norm_eps,
            "vocab_size": c.vocab_size,
            "max_position_embeddings": c.max_context,
            **rope_json(c.rope),
            **{key: True for key, names in hf.BIAS_SWITCHES.items() if names <= c.biases},
            "shares": list(SHARED),
            "target": self._target.name,
            "target_layers": list(self._layers),
            "draft_vocab_size": len(self._vocabulary),
        }
        tensors = {f"model.{file_name(n)}": w for n, w in self.weights.items()}
        return values, tensors | vocabulary_tensors(self._vocabulary, c.vocab_size)

    def _attend(
        self,
        layer: Layer,
        normed: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        bounds: Sequence[Bounds],
    ) -> torch.Tensor:
        config = self._target.config
        heads = (len(normed), -1, config.head_dim)
        query, key, value = (linear(layer, f"attn_{name}", normed).view(heads) for name in "qkv")
        if config.facts.qk_norm:
            query = rms_norm(query, layer["attn_q_norm"], config.norm_eps)
            key = rms_norm(key, layer["attn_k_norm"], config.norm_eps)
        sizes = [b.end - b.start for b in bounds]
        # [heads, n, dim]
        asked, keys, values = (x.transpose(0, 1) for x in (rotate(query, *turns), rotate(key, *turns), value))
        mixed = [
            functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
            for q, k, v in zip(*(torch.split(x, sizes, 1) for x in (asked, keys, values)), strict=True)
        ]
        return torch.cat(mixed, 1).transpose(0, 1).flatten(1)


def choose_layers(text: str, num_layers: int) -> list[int]:
    """Return the layers that `--layers` names: a list, or how many, evenly spread. Raises `ConfigError`."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and 2 <= numbers[0] <= num_layers:
        count = numbers[0]
        return [round(i * (num_layers - 1) / (count - 1)) for i in range(count)]
    if len(numbers) < 2 or not all(0 <= n < num_layers for n in numbers):
        raise ConfigError(
            f"--layers must be how many of the target's {num_layers} layers, at least 2, or a list such as "
            f"0,1,{num_layers - 1}; not {text!r}"
        )
    return numbers
