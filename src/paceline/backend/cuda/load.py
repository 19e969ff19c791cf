"""Loading for the `cuda` backend: targets, draft heads and cut models. No step comes here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.backend.cuda.attention import check_heads
from paceline.backend.cuda.block_head import CudaBlockHead, read_block
from paceline.backend.cuda.cut_model import CudaCutModel
from paceline.backend.cuda.decoder import CudaDecoder, DecoderWeights
from paceline.backend.cuda.device_memory import check_card, enough_memory, torch_device
from paceline.backend.cuda.device_weights import TYPES, RankReader, Setup, WeightReader
from paceline.backend.cuda.head import CudaHead, HeadWeights
from paceline.backend.cuda.layers import read_stack
from paceline.backend.cuda.output_matrix import DraftOutput
from paceline.backend.cuda.rank_pool import DRAFT_FLAG, check_model, shared_stack
from paceline.backend.rope import inverse_frequencies
from paceline.backend.seam import MAX_REQUEST_TOKENS
from paceline.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.seam import Decoder
    from paceline.model.config import ModelConfig
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.config import HeadConfig
    from paceline.model.heads.cut_model import CutModel

FAST = "fast"  # value of `--numerics`
_FP8 = "fp8"


# Targets -----------------------------------------------------------------------------------------


def load_decoder(
    config: ModelConfig,
    weights: Mapping[str, NDArray[floating]],
    weight_type: str,
    kv_type: str,
    threads: int | None,
    device: Device | None = None,
    numerics: str | None = None,
    num_ranks: int = 1,
) -> CudaDecoder:
    """Make a decoder, see `LoadDecoder`.

    numerics: `fast`, or None for exact. num_ranks: processes that share it, each on a device of its own.
    """
    config.check()
    setup = Setup(torch_device(device), weight_type, kv_type, numerics == FAST, num_ranks)
    check_layers(config, setup)
    check_model(config, num_ranks, "the model")
    if threads is not None and setup.device.type == "cpu":
        torch.set_num_threads(threads)
    with enough_memory("the weights"), torch.inference_mode():
        return CudaDecoder(config, _read_decoder(config, WeightReader(weights, setup), threads), setup)


def check_layers(config: ModelConfig, setup: Setup) -> None:
    """Raise `ConfigError` if no kernel, or none of a device, takes layers in these types."""
    check_heads(config.head_dim, config.num_heads, config.num_kv_heads, setup.kv_type)
    check_card(setup.device, setup.output_type, setup.kv_type, config.head_dim)


def _read_decoder(config: ModelConfig, reader: WeightReader, threads: int | None) -> DecoderWeights:
    embed = reader.tensor("embed")
    rows = embed if config.tie_embeddings else reader.tensor("head")
    factors = reader.weights["rope_factors"] if config.rope.scaling == "factors" else None
    inverse = _inverse(config, reader.setup.device, factors)
    with shared_stack(config, reader, threads, output=True) as (shape, own, lead):
        stack = read_stack(own, shape, config.windows, inverse, lead)
        kind = reader.setup.output_type
        output = own.output_part(rows) if isinstance(own, RankReader) else own.packed(rows, kind)
    return DecoderWeights(
        embed=embed,
        output=output,
        final_norm=reader.tensor("final_norm"),
        layers=stack.layers,
        inverse=inverse,
        lead=lead,
        splits_output=lead is not None,
    )


def _inverse(
    config: ModelConfig, device: torch.device, factors: NDArray[floating] | None
) -> dict[int, torch.Tensor]:
    """Return the angles of rotation per position of layers, by their window."""
    return {
        window: torch.from_numpy(inverse_frequencies(rope, config.head_dim, factors)).to(device)
        for window, rope in config.rope_of_window.items()
    }


# Drafters ----------------------------------------------------------------------------------------


def _draft_setup(target: CudaDecoder, device: Device | None, weight_type: str | None, num_ranks: int) -> Setup:
    """Return a drafter's setup: the target's, except what was asked. Raises `ConfigError`."""
    setup = target.setup
    if weight_type is not None and weight_type not in TYPES:
        raise ConfigError(f"the cuda backend has no drafters of {weight_type}{suggest(weight_type, TYPES)}")
    where = setup.device if device is None else torch_device(device)
    kind = weight_type or setup.weight_type
    own = replace(setup, device=where, weight_type=kind, num_ranks=num_ranks)
    return own if own.dtype == setup.dtype or setup.kv_type == _FP8 else replace(own, kv_type="auto")


def load_runner(
    head: Head, target: Decoder, device: Device | None, weight_type: str | None, num_ranks: int = 1
) -> CudaHead:
    """Make a head's runner, see `LoadHeadRunner`. num_ranks: processes that share its layers."""
    assert isinstance(target, CudaDecoder)
    setup, layers = _draft_setup(target, device, weight_type, num_ranks), head.config.layers
    check_layers(layers, setup)
    check_model(layers, num_ranks, "the draft head", DRAFT_FLAG)
    reader = WeightReader(head.weights, setup)
    with enough_memory("the draft head"), torch.inference_mode():
        weights = _read_head(head.config, reader, target)
        rows = reader.tensor("head") if head.config.own_output else target.output.rows(head.token_ids, setup)
        room = MAX_REQUEST_TOKENS if head.config.request_tokens else 0
        output = DraftOutput(reader, rows, head.token_ids, target.output, room)
        if head.config.block:
            of_block = read_block(reader, head.config.block)
            return CudaBlockHead(head.config, weights, output, setup, target, of_block=of_block)
        return CudaHead(head.config, weights, output, setup, target)


def _read_head(config: HeadConfig, reader: WeightReader, target: CudaDecoder) -> HeadWeights:
    c, device = config, reader.setup.device
    own_embed = reader.optional("embed")
    embed = target.weights.embed.to(device, reader.setup.dtype) if own_embed is None else own_embed
    fc_norms = [reader.tensor(f"fc_norm.{i}") for i in range(len(c.taps))] if c.fc_norm else []
    target_norm = target.weights.final_norm.to(device, reader.setup.dtype)
    inverse = _inverse(c.layers, device, None)
    with shared_stack(c.layers, reader, None) as (shape, own, lead):
        stack = read_stack(own, shape, c.layers.windows, inverse, lead)
    return HeadWeights(
        embed=embed,
        owns_embed=own_embed is not None,
        fc=reader.matrix("fc"),
        fc_norms=fc_norms,
        input_norm=reader.optional("input_norm"),
        embed_norm=reader.optional("embed_norm"),
        feature_norm=reader.optional("feature_norm"),
        hidden_norm=reader.optional("layers.0.hidden_norm"),
        norm=reader.optional("norm"),
        target_norm=target_norm if c.algorithm.guesses_features else None,
        mask_taps=reader.optional("mask_hidden"),
        stack=stack,
    )


def load_cut_model(
    model: CutModel, target: Decoder, device: Device | None, weight_type: str | None, num_ranks: int = 1
) -> CudaCutModel:
    """Make a draft model's decoder, see `LoadCutModel`. num_ranks: processes that share its layers."""
    assert isinstance(target, CudaDecoder)
    config, setup = model.config, _draft_setup(target, device, weight_type, num_ranks)
    check_layers(config, setup)
    check_model(config, num_ranks, "the draft model", DRAFT_FLAG)
    reader = WeightReader(model.weights, setup)
    with enough_memory("the draft model"), torch.inference_mode():
        ids = model.token_ids
        output = DraftOutput(reader, target.output.rows(ids, setup), ids, target.output, MAX_REQUEST_TOKENS)
        inverse = _inverse(config, setup.device, None)
        with shared_stack(config, reader, None) as (shape, own, lead):
            stack = read_stack(own, shape, config.windows, inverse, lead)
        weights = DecoderWeights(
            embed=target.weights.embed.to(setup.device, setup.dtype),
            output=output.matrix,
            final_norm=reader.tensor("final_norm"),
            layers=stack.layers,
            inverse=inverse,
            lead=lead,
        )
        return CudaCutModel(CudaDecoder(config, weights, setup), output)
