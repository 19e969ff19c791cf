"""First weights of a block head from a draft model with as many layers.

A draft model reads keys and values that it computes of the text itself. A block head reads keys and values that
its layers make of the target's hidden states. So the layers are copied, and `fc` is fitted: from the taps it
makes, in least squares, one feature that the copied layers turn into the draft model's keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.core.errors import DrafterMismatch
from paceline.model.heads.cut_model import load_cut_model
from paceline.train.batch import Batcher
from paceline.train.corpus import packs, shuffled
from paceline.train.cut_model_recipe import residual_streams
from paceline.train.progress import progress

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.model.heads.cut_model import CutModel
    from paceline.train.run import TrainMaterial

    Weights = dict[str, torch.Tensor]

FIT_TOKENS = 60_000  # tokens of the training texts that the fit reads
PASS_TOKENS = 2048  # tokens of one pass of the draft model
SKIPPED = 4  # first tokens of a text, whose hidden states are far larger than all others in many models
RIDGE = 1e-3  # added to the diagonal of a matrix before it is inverted, as a share of the diagonal's mean
_READ = ("attn_q", "attn_k", "attn_v")  # matrices that read a layer's normed input


@torch.no_grad()
def weights_from_draft_model(
    folder: Path, num_layers: int, material: TrainMaterial, scales: torch.Tensor
) -> Weights:
    """Return a block head's weights that guess its first draft as a draft model does.

    scales: [tapped_size] sizes of the taps; the returned `fc` reads taps divided by them. Raises `ModelError`.
    """
    cut = load_cut_model(folder, material.target.config)
    if cut.config.num_layers != num_layers:
        raise DrafterMismatch(
            f"--start-from {folder}: this draft model has {cut.config.num_layers} layers, and the head to be "
            f"trained has {num_layers}; add --layers {cut.config.num_layers}"
        )
    theirs = {n: torch.tensor(cut.weights[n], dtype=torch.float32).to(scales.device) for n in cut.weights}
    layers = [_folded(theirs, number) for number in range(num_layers)]
    moments = _measure(cut, theirs, material, scales)
    for layer, products in zip(layers, moments.inputs, strict=True):
        for name in "qk":  # a block head norms queries and keys; a draft model may not
            size = _mean_square(layer[f"attn_{name}"], products).sqrt()
            layer.setdefault(f"attn_{name}_norm", size.expand(cut.config.head_dim).clone())
    made = {f"layers.{number}.{name}": w for number, layer in enumerate(layers) for name, w in layer.items()}
    fc = _fit(layers, moments)
    size = _mean_square(fc, moments.taps).sqrt()
    return made | {"fc": fc, "hidden_norm": size.expand(len(fc)).clone(), "norm": theirs["final_norm"]}


def _folded(theirs: Weights, number: int) -> Weights:
    """Return a layer's weights with its first norm's factors in the matrices behind it.

    The factors of the layers differ, and one feature serves all layers.
    """
    prefix = f"layers.{number}."
    layer = {n.removeprefix(prefix): w for n, w in theirs.items() if n.startswith(prefix)}
    factors = layer["attn_norm"]
    return layer | {name: layer[name] * factors for name in _READ} | {"attn_norm": torch.ones_like(factors)}


@dataclass(frozen=True, slots=True, eq=False)
class _Moments:
    """Mean products over tokens, of the taps [tapped_size] and of each layer's normed input [width]."""

    taps: torch.Tensor  # [tapped_size, tapped_size] taps with taps
    crossed: list[torch.Tensor]  # by layer: [tapped_size, width] taps with inputs
    inputs: list[torch.Tensor]  # by layer: [width, width] inputs with inputs


def _measure(cut: CutModel, theirs: Weights, material: TrainMaterial, scales: torch.Tensor) -> _Moments:
    """Run the draft model over training texts; the norm of its inputs is without factors."""
    config, target = cut.config, material.target
    batcher = Batcher(target, material.corpus.texts, material.store, material.vocabulary)
    width, tapped, layers = config.hidden_size, len(scales), range(config.num_layers)
    taps = scales.new_zeros(tapped, tapped)
    crossed, inputs = ([scales.new_zeros(rows, width) for _ in layers] for rows in (tapped, width))
    seen = 0
    with progress("fitting to the draft model, tokens") as update:
        for numbers in packs(shuffled(material.training, 0, 0), batcher.lengths(), PASS_TOKENS):
            batch = batcher.make(numbers)
            kept = torch.cat([torch.arange(b.start + SKIPPED, b.end) for b in batch.bounds]).to(scales.device)
            read = batch.tapped[kept] / scales
            taps.addmm_(read.T, read)
            streams = residual_streams(
                config, theirs, config.num_layers, target.embed[batch.token_ids], batch.bounds
            )
            for number, stream in zip(layers, streams, strict=False):  # the last one is the output
                normed = torch.nn.functional.rms_norm(stream[kept], (width,), eps=config.norm_eps)
                crossed[number].addmm_(read.T, normed)
                inputs[number].addmm_(normed.T, normed)
            seen += len(kept)
            update(min(seen, FIT_TOKENS), FIT_TOKENS, "")
            if seen >= FIT_TOKENS:
                break
    return _Moments(taps / seen, [c / seen for c in crossed], [i / seen for i in inputs])


def _fit(layers: list[Weights], moments: _Moments) -> torch.Tensor:
    """Return `fc` [width, tapped_size].

    The feature c of a token minimises the sum of |M (c - x)|^2 over all layers, where x is the layer's normed
    input and M its matrix of keys or of values, divided by the usual size of its product. c is linear in all x, so
    the regression of c on the taps needs the means of products only.
    """
    wanted, read = torch.zeros_like(moments.crossed[0]), torch.zeros_like(moments.inputs[0])
    for layer, crossed, products in zip(layers, moments.crossed, moments.inputs, strict=True):
        for name in ("attn_k", "attn_v"):
            weighed = layer[name].T @ layer[name] / _mean_square(layer[name], products)
            wanted += crossed @ weighed
            read += weighed
    by_taps: torch.Tensor = torch.linalg.solve(_damped(moments.taps), wanted)
    made: torch.Tensor = torch.linalg.solve(_damped(read), by_taps.T)
    return made


def _mean_square(matrix: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Return the mean square of a matrix's outputs, from the mean products of its inputs."""
    return ((matrix @ products) * matrix).sum() / len(matrix)


def _damped(products: torch.Tensor) -> torch.Tensor:
    """Return a matrix that can be inverted."""
    return products + RIDGE * products.diagonal().mean() * torch.eye(len(products), device=products.device)
