"""`paceline train draft-model`: train a model cut from some of the target's layers.

It uses the target's embedding and output matrix, with a reduced vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from paceline.backend.reference.attention import cos_sin, rotate, rotation_of
from paceline.backend.reference.decoder import ACTIVATIONS, linear, rms_norm
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.core.flags import listed
from paceline.model.config import layer_shapes
from paceline.model.heads.config import EAGLE3
from paceline.model.heads.cut_model import SHARED, load_cut_model
from paceline.train.head_recipe import file_name, rope_json, vocabulary_tensors
from paceline.train.recipe import hash_of, inherit
from paceline.train.train_options import add_training, gather, open_target, train_and_report, train_config

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig
    from paceline.train.batch import TrainBatch
    from paceline.train.drafts import DraftDepth, TextBounds
    from paceline.train.target_model import TrainTarget

    Layer = dict[str, torch.Tensor]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_training(parser)
    parser.add_argument("--layers", default="4", metavar="N|I,J,...", help="of the target: how many, or which")
    parser.add_argument("--k", type=int, default=4, metavar="K", help="drafts to evaluate")


def run(args: Namespace) -> int:
    """Train a copy of some of the target's layers."""
    target = open_target(args)
    if not can_be_cut(target.config):
        raise UnsupportedModel(
            "draft models are cut from targets like Llama and Qwen, whose layers see all tokens and whose RoPE is "
            "plain, linear or llama3; train a head"
        )
    layers = choose_layers(args.layers, target.config.num_layers)
    # A cut model reads no taps. With the default taps of heads it can share their feature files.
    material = gather(args, target, EAGLE3.default_taps(target.config.num_layers))
    config = train_config(args, material, eval_steps=args.k)
    recipe = CutModelRecipe(layers, target, material.vocabulary)
    return train_and_report(args, material, recipe, {"layers": layers}, config)


class CutModelRecipe:
    """Copied target layers with their own final norm; embedding and output rows are the target's."""

    num_steps = 1  # it always predicts from true tokens
    num_frozen = 0

    def __init__(self, layers: Sequence[int], target: TrainTarget, vocabulary: NDArray[int64]) -> None:
        """layers: the target's layers, in this order. vocabulary: [draft_vocab] target ids, ascending."""
        self._target = target
        self._layers = layers
        self._vocabulary = vocabulary
        self.inherited: set[str] = set()
        device = target.embed.device
        self._head = target.head[torch.from_numpy(vocabulary).to(device)]
        self.weights = {"norm": target.final_norm.clone()}
        for number, theirs in enumerate(layers):
            for name in layer_shapes(target.config, theirs):
                copied = torch.tensor(target.model.weights[f"layers.{theirs}.{name}"], dtype=torch.float32)
                self.weights[f"layers.{number}.{name}"] = copied.to(device)

    def output_rows(self, own_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's output rows, see `Recipe`."""
        return torch.cat([self._head, self._target.head[own_ids]]) if len(own_ids) else self._head

    def predict(self, batch: TrainBatch, depths: Sequence[DraftDepth]) -> list[torch.Tensor]:
        """Return the last hidden states, computed once for all depths, see `Recipe`."""
        config = self._target.config
        embedded = self._target.embed[batch.token_ids]
        *_, hidden = residual_streams(config, self.weights, len(self._layers), embedded, batch.bounds)
        normed = rms_norm(hidden, self.weights["norm"], config.norm_eps)
        return [normed[depth.anchors + number] for number, depth in enumerate(depths)]

    def start_from(self, folder: Path) -> str:
        """Copy the layers and the norm of a trained cut model, see `Recipe`."""
        trained = load_cut_model(folder, self._target.config).weights
        self.inherited = inherit(self.weights, {**trained, "norm": trained["final_norm"]})
        return hash_of(folder)

    def export(self) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
        """Return a folder that `model.heads.cut_model` reads, see `Recipe`."""
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
            "sliding_window": None,  # as `can_be_cut` requires; without the key some families assume one
            **rope_json(c.rope),
            **{key: names <= c.biases for key, names in c.facts.bias_switches.items()},
            "shares": list(SHARED),
            "target": self._target.name,
            "target_layers": list(self._layers),
            "draft_vocab_size": len(self._vocabulary),
        }
        tensors = {f"model.{file_name(n)}": w for n, w in self.weights.items()}
        return values, tensors | vocabulary_tensors(self._vocabulary, c.vocab_size)


def residual_streams(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    num_layers: int,
    embedded: torch.Tensor,
    bounds: Sequence[TextBounds],
) -> Iterator[torch.Tensor]:
    """Yield the residual stream [n, width] before each layer and after the last.

    embedded: [n, width] embeddings of packed texts. weights: by canonical name, as of a model of these layers.
    """
    positions = torch.cat([torch.arange(b.end - b.start) for b in bounds]).to(embedded.device)
    rotation = rotation_of(config.rope, config.head_dim, embedded.device)
    rotations = cos_sin(positions, rotation, embedded.dtype)
    hidden = embedded
    yield hidden
    for number in range(num_layers):
        prefix = f"layers.{number}."
        layer = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        normed = rms_norm(hidden, layer["attn_norm"], config.norm_eps)
        hidden = hidden + linear(layer, "attn_o", _attend(config, layer, normed, rotations, bounds))
        normed = rms_norm(hidden, layer["mlp_norm"], config.norm_eps)
        gate = ACTIVATIONS[config.facts.activation](linear(layer, "mlp_gate", normed))
        hidden = hidden + linear(layer, "mlp_down", gate * linear(layer, "mlp_up", normed))
        yield hidden


def _attend(
    config: ModelConfig,
    layer: Layer,
    normed: torch.Tensor,
    rotations: tuple[torch.Tensor, torch.Tensor],
    bounds: Sequence[TextBounds],
) -> torch.Tensor:
    """Return what a layer's heads mix in each text, [n, heads * dim]."""
    heads = (len(normed), -1, config.head_dim)
    query, key, value = (linear(layer, f"attn_{name}", normed).view(heads) for name in "qkv")
    if config.facts.qk_norm:
        query = rms_norm(query, layer["attn_q_norm"], config.norm_eps)
        key = rms_norm(key, layer["attn_k_norm"], config.norm_eps)
    sizes = [b.end - b.start for b in bounds]
    rotated = (rotate(query, *rotations), rotate(key, *rotations), value)
    queries, keys, values = (x.transpose(0, 1) for x in rotated)  # [heads, n, dim]
    mixed = [
        functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        for q, k, v in zip(*(torch.split(x, sizes, 1) for x in (queries, keys, values)), strict=True)
    ]
    return torch.cat(mixed, 1).transpose(0, 1).flatten(1)


def can_be_cut(config: ModelConfig) -> bool:
    """Return True if this recipe computes all that the model's layers do.

    RoPE must be of a kind that heads may have, too: the config.json that is written can state no other.
    """
    facts, factors = config.facts, (config.embed_scale, config.logit_divisor)
    as_stored = not (facts.interleaves_rope or facts.norms_from_one or facts.names or facts.keys)
    return (
        as_stored
        and facts.norms == "before"
        and set(factors) == {1.0}
        and config.rope == config.rope.of_head()
        and config.sliding is None
        and not config.needs
    )


def choose_layers(text: str, num_layers: int) -> list[int]:
    """Return the layers of `--layers`: a list, or a number to spread evenly. Raises `ConfigError`."""
    numbers = listed(text, int)
    if len(numbers) == 1 and 2 <= numbers[0] <= num_layers:
        count = numbers[0]
        return [round(i * (num_layers - 1) / (count - 1)) for i in range(count)]
    if len(numbers) < 2 or not all(0 <= n < num_layers for n in numbers):
        raise ConfigError(
            f"--layers must be how many of the target's {num_layers} layers, at least 2, or a list such as "
            f"0,1,{num_layers - 1}; not {text!r}"
        )
    return list(numbers)
