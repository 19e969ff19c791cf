"""Loading for the `native` backend: weights packed, types checked, decoders compiled. No step comes here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline import kernels
from paceline.backend.native.block_head import NativeBlockHead
from paceline.backend.native.decoder import NativeDecoder, SharedTables, as_float32
from paceline.backend.native.draft_vocabulary import DraftVocabulary
from paceline.backend.native.head import NativeHead
from paceline.backend.native.packing import kept, matrix_type, pack, pack_layer
from paceline.backend.registry import FILE, MAX_INT_KV_HEAD
from paceline.backend.rope import inverse_frequencies, magnitudes
from paceline.core.errors import ConfigError, suggest
from paceline.core.system import on_cores, usable_cores
from paceline.model.config import ModelConfig, Rope, layer_shapes, tensor_shapes
from paceline.model.files.packed_file import Wanted
from paceline.model.heads.config import head_shapes
from paceline.model.weights import LazyWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import float32, floating, int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.native.packing import PackedLayer
    from paceline.backend.seam import Decoder
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.config import HeadConfig

# Weights of drafters. Four bits are read in half the time. They cost a guess now and then, but change no text, as
# guesses are checked. Where the target keeps floats, so does the drafter.
DRAFT_WEIGHT_TYPES = ("int4_row", "int8", "bf16", "f32")
_FOUR_BIT_DRAFTS = ("int8", "int4", FILE)  # types of targets whose drafters get four bits

_MIXES = ("gate", "joint")  # names of correctors' matrices; a corrector has at most one of them
_TABLES = ("embed", "head", "input_embed")
_TABLE_TYPES = {"int4": "int8", "int4_row": "int8"}  # types of tables: four bits would change too many choices
_MAX_INT8_COLUMNS = 1 << 16  # this and the next: the kernels' own bounds


def load_decoder(
    config: ModelConfig,
    weights: Mapping[str, NDArray[floating]],
    weight_type: str,
    kv_type: str,
    threads: int | None,
    device: Device | None = None,
) -> NativeDecoder:
    """Make a decoder, see `LoadDecoder`."""
    return pack_decoder(config, weights, team_of(device, threads), weight_type, kv_type)


def pack_decoder(
    config: ModelConfig,
    weights: Mapping[str, NDArray[floating]],
    team: kernels.ThreadPool,
    weight_type: str = "int8",
    kv_type: str = "i16",
    packers: kernels.ThreadPool | None = None,
) -> NativeDecoder:
    """Pack the tensors named by `tensor_shapes(config)`; `team` is shared by all decoders of a process.

    packers: threads that pack; None: the team's.
    Raises `ConfigError` for types that the model is too wide for.
    """
    parts = pack_parts(config, weights, packers or team, weight_type, kv_type)
    tables = parts.tables
    entry = Entry(tables.embed, of_layers=parts.inputs)
    compile_for = partial(compile_decoder, config, team, entry=entry, layers=parts.layers, factors=parts.factors)
    compiled = compile_for(output=Output(tables.head, tables.final_norm))
    return NativeDecoder(config, team, compiled, tables, weight_type, kv_type, compile_for)


class PackedParts(NamedTuple):
    """A model's packed weights."""

    tables: SharedTables
    layers: list[PackedLayer]
    inputs: PackedLayer | None  # makes layer inputs of tokens
    factors: NDArray[floating] | None  # tensor `rope_factors`, for the one RoPE that reads it
    wanted: dict[str, Wanted]


def pack_parts(
    config: ModelConfig,
    weights: Mapping[str, NDArray[floating]],
    packers: kernels.ThreadPool,
    weight_type: str,
    kv_type: str,
) -> PackedParts:
    """Pack the tensors named by `tensor_shapes(config)`, see `pack_decoder`."""
    config.check()
    check_types(config, weight_type, kv_type)
    wanted = wanted_matrices(config, weights, weight_type)
    weights = kept(weights, wanted, packers)
    embed, *untied = (
        pack(weights, name, wanted[name].dtype, packers) for name in ("embed", "head") if name in wanted
    )
    return PackedParts(
        SharedTables(embed, untied[0] if untied else embed, as_float32(weights["final_norm"])),
        [pack_layer(i, layer_shapes(config, i), weights, weight_type, packers) for i in range(config.num_layers)],
        pack_inputs(weights, wanted, packers) if config.layer_input_size else None,
        weights["rope_factors"] if config.rope.scaling == "factors" else None,
        wanted,
    )


def repack(
    decoder: Decoder, weights: Mapping[str, NDArray[floating]], beside: bool
) -> tuple[Decoder, Callable[[], None]]:
    """Pack other weights of the same shape, see `BackendSpec.repack`."""
    assert isinstance(decoder, NativeDecoder)
    if decoder.num_ranks > 1:
        raise ConfigError("ranks keep their first weights: leave out --tensor-parallel")
    team = decoder.team
    packers = kernels.ThreadPool(max(1, team.num_threads // 2)) if beside else team
    fresh = pack_decoder(decoder.config, weights, team, decoder.weight_type, decoder.kv_type, packers)
    return fresh, partial(decoder.adopt, fresh)


def pack_inputs(
    weights: Mapping[str, NDArray[floating]], wanted: Mapping[str, Wanted], team: kernels.ThreadPool
) -> PackedLayer:
    """Return what makes layer inputs of tokens."""
    matrices = {n: pack(weights, n, wanted[n].dtype, team) for n in ("input_embed", "input_proj")}
    return matrices, {"input_norm": as_float32(weights["input_norm"])}


def wanted_matrices(
    config: ModelConfig, weights: Mapping[str, NDArray[floating]], weight_type: str
) -> dict[str, Wanted]:
    """Return type and shape of every matrix of a decoder by canonical name."""
    of_tables = table_type(weight_type)
    return {
        name: Wanted(matrix_type(weights, name, of_tables if name in _TABLES else weight_type), *shape)
        for name, shape in tensor_shapes(config).items()
        if len(shape) == 2
    }


def team_of(device: Device | None, threads: int | None = None) -> kernels.ThreadPool:
    """Return the team for a device. Raises `ConfigError` if it has no cores."""
    if device is not None and device.torch_name is not None:
        raise ConfigError(f"the native backend computes on cores, such as cpu:2-3, not on {device}")
    cores = frozenset[int]() if device is None else device.cores
    return shared_team(threads or len(cores) or len(usable_cores()), cores)


@lru_cache
def shared_team(num_threads: int, cores: frozenset[int]) -> kernels.ThreadPool:
    """Return the process's team of `num_threads`, the asking thread included; passes run in turn."""
    return on_cores(cores, partial(kernels.ThreadPool, num_threads))


# Heads -------------------------------------------------------------------------------------------


def load_runner(
    head: Head, target: Decoder, device: Device | None = None, weight_type: str | None = None
) -> NativeHead:
    """Pack a head beside its target, see `LoadHeadRunner`."""
    assert isinstance(target, NativeDecoder)
    config, weights, algorithm = head.config, head.weights, head.config.algorithm
    weight_type = draft_weight_type(weight_type, target.weight_type)
    check_types(config.layers, weight_type, target.kv_type)
    team = target.team if device is None else team_of(device)
    weights = kept(weights, _head_matrices(config, weights, weight_type), team)
    vectors = {name: as_float32(weights[name]) for name in _vector_names(config)}
    fc = pack(weights, "fc", weight_type, team)
    own_table = "embed" in weights
    embed = pack(weights, "embed", table_type(weight_type), team) if own_table else target.tables.embed
    vocabulary = DraftVocabulary(head.token_ids, target, extensible=config.request_tokens)
    if config.own_output:
        written = _pack_own_output(vocabulary, as_float32(weights["head"]), weight_type)
    else:
        written = pack_head_rows(vocabulary, target, weight_type)
    num_rows = target.config.vocab_size if written is target.tables.head else len(vocabulary.token_ids)
    compiled = compile_decoder(
        replace(config.layers, vocab_size=target.config.vocab_size),
        team,
        entry=Entry(embed, ({"fc": fc}, vectors) if algorithm.guesses_features else None),
        output=Output(
            written,
            vectors.get("norm"),
            vocabulary.mapped_ids,
            config.norm_output,
            _pack_corrector(weights, vectors, vocabulary, num_rows, weight_type, team) if config.block else None,
        ),
        layers=[
            pack_layer(i, _layer_shapes(config, i), weights, weight_type, team)
            for i in range(config.layers.num_layers)
        ],
        norms_residual=config.norm_before_residual,
    )
    fused_apart = 0 if algorithm.guesses_features else fc.num_bytes
    make = NativeBlockHead if config.block else NativeHead
    return make(
        config,
        weight_type,
        own_bytes(compiled, (embed, written), target) + fused_apart,
        target,
        team,
        compiled,
        vocabulary,
        written,
        fc,
        _last_norms(config, vectors),
        vectors,
        weights.get("mask_hidden"),
    )


def _pack_corrector(
    weights: Mapping[str, NDArray[floating]],
    vectors: Mapping[str, NDArray[float32]],
    vocabulary: DraftVocabulary,
    num_rows: int,
    weight_type: str,
    team: kernels.ThreadPool,
) -> PackedLayer:
    """Return what corrects a block's guesses and states how likely they are kept.

    num_rows: rows of the matrix that writes tokens.
    """
    mixes = [name for name in _MIXES if f"corrector.{name}" in weights]
    matrices = {name: pack(weights, f"corrector.{name}", weight_type, team) for name in mixes}
    if "corrector.out" in weights:
        table = as_float32(weights["corrector.out"])
        matrices["out"] = _pack_own_output(vocabulary, table, weight_type, num_rows)
        matrices["before"] = pack(weights, "corrector.before", table_type(weight_type), team)
    own = {"mix_bias": vectors[f"corrector.{mixes[0]}_bias"]} if mixes else {}
    if "confidence" in weights:
        own |= {"confidence": as_float32(weights["confidence"][0]), "confidence_bias": vectors["confidence_bias"]}
    return matrices, own


def _pack_own_output(
    vocabulary: DraftVocabulary, table: NDArray[float32], weight_type: str, num_rows: int | None = None
) -> kernels.Matrix:
    """Pack a drafter's own output matrix.

    table: [num_fixed, width], in the order of the given ids. num_rows: rows of the matrix, zeros at the end; by
    default one for each place of the vocabulary.
    """
    rows = np.zeros((num_rows or len(vocabulary.token_ids), table.shape[1]), np.float32)
    rows[: vocabulary.num_fixed] = table[vocabulary.order]
    return kernels.pack(rows, weight_type)


def pack_head_rows(vocabulary: DraftVocabulary, owner: NativeDecoder, weight_type: str) -> kernels.Matrix:
    """Return the owner's rows of a vocabulary; no copy if fixed and lowest."""
    if vocabulary.is_lowest:
        return owner.tables.head
    return kernels.pack_rows(owner.team, owner.tables.head, vocabulary.token_ids, weight_type)


def _head_matrices(
    config: HeadConfig, weights: Mapping[str, NDArray[floating]], weight_type: str
) -> dict[str, Wanted]:
    """Return a head's own matrices, without output rows: requests write to these."""
    shapes = {name: shape for name, shape in head_shapes(config).items() if len(shape) == 2}
    own = {"fc", *(f"corrector.{name}" for name in _MIXES)}
    found = {
        name: Wanted(matrix_type(weights, name, weight_type), *shape)
        for name, shape in shapes.items()
        if name in own or name.startswith("layers.")
    }
    if before := shapes.get("corrector.before"):
        found["corrector.before"] = Wanted(table_type(weight_type), *before)
    if "embed" in weights and isinstance(weights, LazyWeights):
        found["embed"] = Wanted(table_type(weight_type), *weights.stored("embed").shape)
    return found


def _last_norms(config: HeadConfig, vectors: Mapping[str, NDArray[float32]]) -> NDArray[float32]:
    """Return the norms right before `fc`: [num_norms, the part of the states that each norms]."""
    if config.fc_norm:
        return np.stack([vectors[f"fc_norm.{i}"] for i in range(len(config.taps))])
    return vectors["input_norm"][None] if config.norm_before_fc else np.empty((0, 1), np.float32)


def _vector_names(config: HeadConfig) -> set[str]:
    """Return the norms and biases outside the layers."""
    shapes = head_shapes(config).items()
    return {n for n, shape in shapes if len(shape) == 1 and not n.startswith(("layers.", "mask"))}


def _layer_shapes(config: HeadConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one layer by short name."""
    prefix = f"layers.{index}."
    return {n.removeprefix(prefix): s for n, s in head_shapes(config).items() if n.startswith(prefix)}


def own_bytes(decoder: kernels.Decoder, tables: Sequence[kernels.Matrix], target: NativeDecoder) -> int:
    """Return the bytes of a drafter's packed matrices, tables of its target left out."""
    shared = {id(m): m.num_bytes for m in tables if m is target.tables.embed or m is target.tables.head}
    return decoder.weight_bytes - sum(shared.values())


# Types -------------------------------------------------------------------------------------------


def draft_weight_type(asked: str | None, target: str, also: Sequence[str] = ()) -> str:
    """Return a drafter's type beside a target's. Raises `ConfigError` for an unknown one.

    also: further types that this drafter takes, named in the message; the caller chooses these.
    """
    if asked is None:
        return DRAFT_WEIGHT_TYPES[0] if target in _FOUR_BIT_DRAFTS else target
    if asked not in DRAFT_WEIGHT_TYPES:
        known = dict.fromkeys((*DRAFT_WEIGHT_TYPES, *also))
        listed = ", ".join(known)
        raise ConfigError(f"a drafter's weights are one of {listed}, not {asked!r}{suggest(asked, known)}")
    return asked


def table_type(weight_type: str) -> str:
    """Return the type of embedding and head beside layers of a type."""
    return _TABLE_TYPES.get(weight_type, weight_type)


def check_types(config: ModelConfig, weight_type: str, kv_type: str) -> None:
    """Raise `ConfigError` for sizes whose integer sums could overflow, before any weight is read."""
    widest = config.hidden_size  # columns of embedding and head, whatever the layers' type
    if weight_type in ("int8", "int4_row"):
        widest = max(widest, config.intermediate_size, config.widest_feed)
        widest = max(widest, config.num_heads * max(view.heads.dim for view in config.views))
    if table_type(weight_type) == "int8" and widest > _MAX_INT8_COLUMNS:
        raise ConfigError(
            f"{weight_type} weights take rows of at most {_MAX_INT8_COLUMNS} numbers, and this model has rows of"
            f" {widest}: use --weights bf16"
        )
    if kv_type in ("i16", "i8") and (dim := max(view.heads.dim for view in config.views)) > MAX_INT_KV_HEAD:
        raise ConfigError(
            f"a KV cache of {kv_type} takes heads of at most {MAX_INT_KV_HEAD} numbers, and this model has"
            f" heads of {dim}: use --kv f16"
        )


# Packing -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """First part of a decoder: from tokens to hidden states."""

    embed: kernels.Matrix  # [vocab, hidden]
    fusing: PackedLayer | None = None  # `fc` and its norms: make one input of a token's embedding and feature
    of_layers: PackedLayer | None = None  # makes a token's layer inputs


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Last part of a decoder: from hidden states to tokens."""

    head: kernels.Matrix  # [num_tokens, hidden]
    norm: NDArray[float32] | None  # [hidden]; None only where the decoder fuses features
    token_ids: NDArray[int64] | None = None  # [num_tokens] of the rows of `head`, ascending; None: row numbers
    feeds_normed: bool = False  # True: with several steps, the next step reads the normed state
    corrector: PackedLayer | None = None  # of a block head, perhaps empty; None: no block head


def rotations_of(config: ModelConfig) -> list[tuple[Rope, int]]:
    """Return the RoPEs of a model's layers with the sizes of their heads."""
    return list(dict.fromkeys((view.rope, view.heads.dim) for view in config.views))


def turns(
    rotations: list[tuple[Rope, int]], factors: NDArray[floating] | None
) -> tuple[NDArray[float32], NDArray[float32]]:
    """Return angles and magnitudes, each [num_rotations, pairs of the largest head]."""
    most = max(dim for _, dim in rotations) // 2
    tables = np.zeros((2, len(rotations), most), np.float32)
    for index, (rope, dim) in enumerate(rotations):
        own_factors = factors if rope.scaling == "factors" else None
        tables[0, index, : dim // 2] = inverse_frequencies(rope, dim, own_factors)
        tables[1, index, : dim // 2] = magnitudes(rope, dim)
    return tables[0], tables[1]


def compile_decoder(
    config: ModelConfig,
    team: kernels.ThreadPool,
    *,
    entry: Entry,
    output: Output,
    layers: list[PackedLayer],
    factors: NDArray[floating] | None = None,
    norms_residual: bool = False,
    ranks: kernels.RankMemory | None = None,
) -> kernels.Decoder:
    """Assemble packed weights.

    factors: the tensor `rope_factors`, for the one RoPE that reads it. ranks: memory of the ranks that
    share the layers; these layers are then rank 0's share.
    """
    rotations = rotations_of(config)
    angles, sizes = turns(rotations, factors)
    fusing_matrices, fusing_vectors = entry.fusing or ({}, {})
    input_matrices, input_vectors = entry.of_layers or ({}, {})
    corrector_matrices, corrector_vectors = output.corrector or ({}, {})
    return kernels.Decoder(
        **settings_of(config, ranks.size if ranks else 1),
        pool=team,
        embed=entry.embed,
        head=output.head,
        final_norm=np.empty(0, np.float32) if output.norm is None else output.norm,
        inverse_frequencies=angles,
        magnitudes=sizes,
        layers=layers,
        norms_residual=norms_residual,
        feeds_normed=output.feeds_normed,
        fusing_matrices=fusing_matrices,
        fusing_vectors=fusing_vectors,
        input_matrices=input_matrices,
        input_vectors=input_vectors,
        token_ids=output.token_ids,
        ranks=ranks,
        reads_rows=output.corrector is not None,
        corrector_matrices=corrector_matrices,
        corrector_vectors=corrector_vectors,
    )


def settings_of(config: ModelConfig, num_ranks: int = 1) -> dict[str, Any]:
    """Return the plain numbers of `kernels.Decoder`, for one of `num_ranks` ranks."""
    views, rotations = config.views, rotations_of(config)
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "intermediate": config.widest_feed // num_ranks,
        "num_heads": config.num_heads // num_ranks,
        "head_dim": max(dim for _, dim in rotations),
        "heads": [(view.heads.num_kv // num_ranks, view.heads.dim) for view in views],
        "kv_layers": list(config.kv_layers),
        "norm_eps": config.norm_eps,
        "windows": list(config.windows),
        "ropes": [rotations.index((view.rope, view.heads.dim)) for view in views],
        "query_scale": config.query_scale,
        "embed_scale": config.embed_scale,
        "activation": config.facts.activation,
        "residual_scale": config.residual_factor,
        "score_cap": config.score_cap or 0.0,
        "logit_cap": config.logit_cap or 0.0,
        "query_growth": config.rope.query_growth,
        "query_context": float(config.rope.original_context),
        "norms_all": config.facts.qk_norm == "whole",
        "norms_values": config.facts.norms_values,
        "experts_per_token": config.experts.per_token if config.experts else 0,
        "norms_shares": config.experts is None or config.experts.normed,
        "routes_by_sigmoid": config.experts is not None and config.experts.sigmoid,
        "share_scale": config.experts.scale if config.experts else 1.0,
    }
