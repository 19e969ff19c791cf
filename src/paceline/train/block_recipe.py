"""Block heads in training: initial weights, predictions, files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.model.heads.block_format import TENSOR_NAMES
from paceline.model.heads.checkpoint import load_head
from paceline.model.heads.config import OWN_TOKENS, head_shapes, read_config
from paceline.model.heads.cut_model import shares_tables
from paceline.train.block_drafts import draft_blocks
from paceline.train.block_start import weights_from_draft_model
from paceline.train.feature_store import SCALE
from paceline.train.head_recipe import DEVIATION, FIRST_NORM, file_name, layer_json, vocabulary_tensors
from paceline.train.recipe import hash_of, inherit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.model.heads.config import HeadConfig
    from paceline.train.batch import TrainBatch
    from paceline.train.drafts import DraftDepth
    from paceline.train.run import TrainMaterial
    from paceline.train.target_model import TrainTarget

FIRST_FUSION = 0.005  # standard deviation of the initial `fc`, to which an identity is added
SCALE_TEXTS = 8  # training texts from which the usual size of each tap is measured
_FILE_NAMES = {ours: theirs for theirs, ours in TENSOR_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeadChoices:
    """Settings of a block head that the user chooses."""

    num_layers: int
    size: int  # drafts of a block
    taps: tuple[int, ...]
    mask_token_id: int
    corrector: str = "rnn"
    rank: int = 64
    own_tokens: bool = False
    dflash: bool | None = None  # True: the anchor's query guesses nothing; else each query guesses the next token


class BlockHeadRecipe:
    """A block head, see `Recipe`.

    Its output matrix is rows of the target's, which are not trained. Taps of deep layers are ten times as large as
    taps of early layers. So `fc` is trained on taps divided by their usual size, and converted for undivided taps
    when it is written.
    """

    def __init__(
        self, choices: BlockHeadChoices, material: TrainMaterial, seed: int, *, shares_head: bool
    ) -> None:
        """shares_head: leave the output rows out of the files."""
        self._shares_head = shares_head
        self._material, self._target = material, (target := material.target)
        self._vocabulary = material.vocabulary
        self._values = config_json(choices, target, len(material.vocabulary))
        self._config = read_config(self._values, target.config)
        self._scales = tap_scales(material).to(target.embed.device)
        self._head = target.head[torch.from_numpy(material.vocabulary).to(target.head.device)]
        self.num_steps = choices.size
        self.num_frozen = target.config.hidden_size
        self.weights = first_weights(self._config, choices, target, seed)
        self.inherited: set[str] = set()

    def output_rows(self, own_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's rows, then the corrector's columns, see `Recipe`."""
        rows = torch.cat([self._head, self._target.head[own_ids]]) if len(own_ids) else self._head
        if "corrector.out" not in self.weights:
            return rows
        own = rows.new_zeros(len(own_ids), self.weights["corrector.out"].shape[1])
        return torch.cat([rows, torch.cat([self.weights["corrector.out"], own])], 1)

    def predict(self, batch: TrainBatch, depths: Sequence[DraftDepth]) -> list[torch.Tensor]:
        """Run the head over all blocks, see `Recipe`."""
        scaled = replace(batch, tapped=batch.tapped / self._scales)
        return draft_blocks(self._config, self.weights, self._target.embed, scaled, depths)

    def start_from(self, folder: Path) -> str:
        """Take the weights of a trained head or a draft model, see `Recipe`.

        Of a head, those of equal name and shape are copied. `fc` is copied only from a head with the same taps,
        as its columns belong to taps.
        """
        if shares_tables(folder):
            made = weights_from_draft_model(folder, self._config.layers.num_layers, self._material, self._scales)
            self.weights |= made
            self.inherited = set(made)
            return hash_of(folder)
        trained = load_head(folder, self._target.config)
        found = dict(trained.weights)
        fc = found.pop("fc")
        if trained.config.taps == self._config.taps and fc.shape == self.weights["fc"].shape:
            found["fc"] = fc * self._scales.cpu().numpy()
        if "corrector.out" in found:
            found["corrector.out"] = self._aligned(found["corrector.out"], trained.token_ids)
        self.inherited = inherit(self.weights, found)
        return hash_of(folder)

    def export(self) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
        """Return a folder of the `speculators` format, see `Recipe`."""
        whole = {**self.weights, "fc": self.weights["fc"] / self._scales}
        whole |= {} if self._shares_head else {"head": self._head}
        tensors = {_FILE_NAMES.get(name, "") or file_name(name): w for name, w in whole.items()}
        return self._values, tensors | vocabulary_tensors(self._vocabulary, self._target.config.vocab_size)

    def _aligned(self, rows: NDArray[np.floating], token_ids: NDArray[int64]) -> NDArray[np.floating]:
        """Return another vocabulary's rows in the order of ours; missing ones are zeros."""
        made = np.zeros((len(self._vocabulary), rows.shape[1]), rows.dtype)
        _, here, there = np.intersect1d(self._vocabulary, token_ids, return_indices=True)
        made[here] = rows[there]
        return made


def config_json(choices: BlockHeadChoices, target: TrainTarget, draft_vocab_size: int) -> dict[str, Any]:
    """Return the head's config.json in the `speculators` format."""
    kind, architecture = ("dflash", "DFlashDraftModel") if choices.dflash else ("dspark", "DSparkDraftModel")
    return {
        **({OWN_TOKENS: True} if choices.own_tokens else {}),
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": choices.size}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {**layer_json(target.config, choices.num_layers), "model_type": "qwen3"},
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target.config.hidden_size,
        "aux_hidden_state_layer_ids": list(choices.taps),
        "block_size": choices.size + 1 if choices.dflash else choices.size,
        "mask_token_id": choices.mask_token_id,
        "sample_from_anchor": not choices.dflash,
        "markov_rank": choices.rank if choices.corrector else 0,
        "markov_head_type": choices.corrector or "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        "tie_word_embeddings": False,
    }


def tap_scales(material: TrainMaterial) -> torch.Tensor:
    """Return each tap's usual size, repeated for all its numbers: [tapped_size] float32."""
    sizes = []
    for number in material.training[:SCALE_TEXTS]:
        states = torch.from_numpy(np.array(material.store[number].states)).float() / SCALE
        sizes.append(states.square().mean(-1).sqrt())
    usual = torch.cat(sizes).median(0).values
    return usual.repeat_interleave(material.target.config.hidden_size)


def first_weights(
    config: HeadConfig, choices: BlockHeadChoices, target: TrainTarget, seed: int
) -> dict[str, torch.Tensor]:
    """Return a head's initial weights."""
    random = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in head_shapes(config).items():
        weights[name] = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=random) * DEVIATION
    weights.pop("head", None)  # the recipe has the target's rows instead; a whole vocabulary has no `head`
    width = target.config.hidden_size
    weights["fc"] *= FIRST_FUSION / DEVIATION
    weights["fc"][:, -width:] += torch.eye(width)
    weights["norm"] = target.final_norm.cpu() * FIRST_NORM
    if choices.corrector:
        weights["corrector.before"] = main_directions(target.embed.cpu(), choices.rank)
        weights["corrector.out"].zero_()
    return {name: w.to(target.embed.device) for name, w in weights.items()}


def main_directions(embed: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the embeddings' largest principal components [vocab, rank], with a mean square of 1.

    So a token that is rare in the data starts near similar tokens.
    """
    centred = embed - embed.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    made: torch.Tensor = centred @ vectors[:, -rank:]
    return made / made.square().mean().sqrt()
