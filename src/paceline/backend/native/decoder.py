"""The `native` backend: C++ kernels for CPUs (csrc/), one call per forward pass, the same bits in every batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from paceline import kernels
from paceline.backend.device import on_cores
from paceline.backend.native.passes import forward, forward_in_turn, whole_pass
from paceline.backend.rope import inverse_frequencies
from paceline.backend.seam import SampledTokens, num_cores
from paceline.core.errors import ConfigError
from paceline.core.noise import Lane, key
from paceline.core.sampling import no_edits
from paceline.model.config import ModelConfig, layer_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import float32, floating, int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.packed import Packed
    from paceline.backend.seam import KV, Begin, MultiStep, StepLimit
    from paceline.core.nouns import SamplingSpec
    from paceline.model.files.gguf_file import FourBit

    PackedLayer = tuple[dict[str, kernels.Matrix], dict[str, NDArray[float32]]]  # matrices, vectors

_KINDS = {"argmax": 0, "noisy": 1, "logits": 2, "sampled": 3}  # as csrc/decoder.h

_TABLE_TYPES = {"int4": "int8", "int4_row": "int8"}  # where four bits would cost too much of the choice
_MOST_INT8_COLUMNS = 1 << 16  # as the border of the kernels has it, and the next
_MOST_WHOLE_HEAD_DIM = 256


@runtime_checkable
class _KeepsBlocks(Protocol):
    def four_bit(self, name: str) -> FourBit | None: ...


def load_decoder(
    config: ModelConfig,
    weights: Mapping[str, NDArray[floating]],
    weight_type: str,
    kv_type: str,
    threads: int | None,
    device: Device | None = None,
) -> NativeDecoder:
    """Make a decoder, see `backend/registry.py`."""
    return NativeDecoder(config, weights, team_of(device, threads), weight_type, kv_type)


def team_of(device: Device | None, threads: int | None = None) -> kernels.Team:
    """Return the team for a device. Raises `ConfigError` if it is none of cores."""
    if device is not None and device.torch_name is not None:
        raise ConfigError(f"the native backend computes on cores, such as cpu:2-3, not on {device}")
    cores = frozenset[int]() if device is None else device.cores
    return _team(threads or len(cores) or num_cores(), cores)


@lru_cache
def _team(num_threads: int, cores: frozenset[int]) -> kernels.Team:
    """Return the process's team of so many threads there, which does one pass after another, whoever asks.

    The thread that asks for a pass is one of them.
    """
    return on_cores(cores, partial(kernels.Team, num_threads))


def table_type(weight_type: str) -> str:
    """Return the type of embedding and head beside layers of a type."""
    return _TABLE_TYPES.get(weight_type, weight_type)


def check_types(config: ModelConfig, weight_type: str, kv_type: str) -> None:
    """Raise `ConfigError` for sizes that whole numbers of these types cannot sum up, before any weight is read."""
    widest = config.hidden_size  # columns of embedding and head, whatever the others' type
    if weight_type in ("int8", "int4_row"):
        widest = max(widest, config.intermediate_size, config.num_heads * config.head_dim)
    if table_type(weight_type) == "int8" and widest > _MOST_INT8_COLUMNS:
        raise ConfigError(
            f"{weight_type} weights take rows of at most {_MOST_INT8_COLUMNS} numbers, and this model has rows of"
            f" {widest}: use --weights bf16"
        )
    if kv_type in ("i16", "i8") and config.head_dim > _MOST_WHOLE_HEAD_DIM:
        raise ConfigError(
            f"a KV cache of {kv_type} takes heads of at most {_MOST_WHOLE_HEAD_DIM} numbers, and this model has"
            f" heads of {config.head_dim}: use --kv f16"
        )


class NativeDecoder:
    """A Llama-family decoder over packed weights: a token's numbers depend on its own row only."""

    name = "native"

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, NDArray[floating]],
        team: kernels.Team,
        weight_type: str = "int8",
        kv_type: str = "i16",
    ) -> None:
        """Pack the tensors named by `tensor_shapes(config)`; `team` is shared by all decoders of a process.

        Raises `ConfigError` for types that the model is too wide for.
        """
        config.check()
        check_types(config, weight_type, kv_type)
        self.config = config
        self.team = team
        self.weight_type, self.kv_type = weight_type, kv_type
        self._begun: kernels.Begun | None = None  # the last one: it has what a pass reads and writes
        self._alone = Lock()  # compiled layers have room for one pass: a drafter may use the target's own
        of_tables = table_type(weight_type)
        self.embed = pack(weights, "embed", of_tables)
        self.head = self.embed if config.tie_embeddings else pack(weights, "head", of_tables)
        self.final_norm = as_float32(weights["final_norm"])
        factors = weights["rope_factors"] if config.rope.scaling == "factors" else None
        self._decoder = compile_decoder(
            config,
            team,
            embed=self.embed,
            output=Output(self.head, self.final_norm),
            layers=[pack_layer(i, layer_shapes(config), weights, weight_type) for i in range(config.num_layers)],
            factors=factors,
        )

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self.name}, {self.weight_type} weights, {self.kv_type} KV, {kernels.isa()}"

    @property
    def beside(self) -> Begin | None:
        """Begins a pass on the team's other threads, if there are any; the caller joins them when it waits."""
        return self._begin if self.team.num_threads > 1 else None

    @property
    def in_turn(self) -> MultiStep:
        """Runs passes in turn."""
        return self._run_in_turn

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return self._decoder.weight_bytes

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> kernels.KVStore:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        c = self.config
        return kernels.KVStore(self.kv_type, num_layers or c.num_layers, num_pages, c.num_kv_heads, c.head_dim)

    def run(
        self,
        packed: Packed,
        kv: KV,
        specs: Sequence[SamplingSpec],
        *,
        num_layers: int | None = None,
        vocab_size: int | None = None,
        taps: Sequence[int] = (),
    ) -> SampledTokens:
        """Run a pass and choose its tokens, see `backend.Decoder`."""
        assert isinstance(kv, kernels.KVStore)
        vocab = self._num_choices(vocab_size)
        layers = num_layers or self.config.num_layers
        with self._alone:
            chosen = forward(self._decoder, packed, kv, specs, vocab=vocab, num_layers=layers, taps=taps)
        missing = (vocab_size or vocab) - vocab  # the target's padding rows
        if not missing or chosen.logits is None:
            return chosen
        padded = np.pad(chosen.logits, ((0, 0), (0, missing)), constant_values=-np.inf)
        return replace(chosen, logits=padded)

    def _begin(
        self, packed: Packed, kv: KV, specs: Sequence[SamplingSpec], *, taps: Sequence[int] = ()
    ) -> Callable[[], SampledTokens]:
        assert isinstance(kv, kernels.KVStore)
        c = self.config
        whole = whole_pass(self._decoder, packed, kv, specs, c.vocab_size, c.num_layers, taps)
        with self._alone:
            self._begun = None  # to drop one is to wait for it
            self._begun = self._decoder.begin(*whole.arguments)

        def finish() -> SampledTokens:
            with self._alone:
                self._decoder.finish()
            return whole.chosen

        return finish

    def _run_in_turn(
        self,
        packed: Packed,
        kv: KV,
        specs: Sequence[SamplingSpec],
        ends: Sequence[StepLimit],
        *,
        num_layers: int | None = None,
        vocab_size: int | None = None,
    ) -> SampledTokens:
        assert isinstance(kv, kernels.KVStore)
        vocab, layers = self._num_choices(vocab_size), num_layers or self.config.num_layers
        with self._alone:
            return forward_in_turn(self._decoder, packed, kv, specs, ends, vocab=vocab, num_layers=layers)

    def _num_choices(self, vocab_size: int | None) -> int:
        return min(vocab_size or self.config.vocab_size, self.config.vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What turns hidden states into tokens."""

    head: kernels.Matrix  # [num_tokens, hidden]
    norm: NDArray[float32] | None  # [hidden]; only a decoder that fuses features can do without
    token_ids: NDArray[int64] | None = None  # [num_tokens] of the rows of `head`, ascending; None: their numbers
    feeds_normed: bool = False  # of passes in turn, the next reads a state as the head does
    relay: PackedLayer | None = None  # what tells guesses that are made in one pass of those before them


def compile_decoder(
    config: ModelConfig,
    team: kernels.Team,
    *,
    embed: kernels.Matrix,
    output: Output,
    layers: list[PackedLayer],
    factors: NDArray[floating] | None = None,
    norms_residual: bool = False,
    fusing: PackedLayer | None = None,
) -> kernels.Decoder:
    """Put packed weights together. `factors` is the tensor `rope_factors`, for the one RoPE that reads it.

    fusing: `fc` and what goes with it, which make one input of each token's embedding and feature.
    """
    ropes = config.rope_of_window
    fusing_matrices, fusing_vectors = fusing or ({}, {})
    relay_matrices, relay_vectors = output.relay or ({}, {})
    return kernels.Decoder(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        team=team,
        embed=embed,
        head=output.head,
        final_norm=np.empty(0, np.float32) if output.norm is None else output.norm,
        inverse_frequencies=np.stack(
            [inverse_frequencies(rope, config.head_dim, factors) for rope in ropes.values()]
        ),
        layers=layers,
        windows=list(config.windows),
        ropes=[list(ropes).index(window) for window in config.windows],
        query_scale=config.query_scale,
        embed_scale=config.embed_scale,
        activation=config.facts.activation,
        norms_residual=norms_residual,
        feeds_normed=output.feeds_normed,
        fusing_matrices=fusing_matrices,
        fusing_vectors=fusing_vectors,
        relay_matrices=relay_matrices,
        relay_vectors=relay_vectors,
        token_ids=output.token_ids,
    )


def pack_layer(
    index: int, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, NDArray[floating]], weight_type: str
) -> PackedLayer:
    """Return the matrices, packed, and the vectors of one layer. shapes: of its tensors, by short name."""
    return (
        {n: pack(weights, f"layers.{index}.{n}", weight_type) for n, shape in shapes.items() if len(shape) == 2},
        {n: as_float32(weights[f"layers.{index}.{n}"]) for n, shape in shapes.items() if len(shape) == 1},
    )


def pack(weights: Mapping[str, NDArray[floating]], name: str, weight_type: str) -> kernels.Matrix:
    """Pack one matrix; one that its file keeps in 4-bit blocks of 32 keeps them if 4 bits are wanted."""
    blocks = weights.four_bit(name) if weight_type == "int4" and isinstance(weights, _KeepsBlocks) else None
    if blocks is None:
        return kernels.pack(as_float32(weights[name]), weight_type)
    return kernels.pack_int4(blocks.values, blocks.scales.view(np.uint16), blocks.minima.view(np.uint16))


def as_float32(tensor: NDArray[floating]) -> NDArray[float32]:
    """Return an array as the kernels read it."""
    return np.ascontiguousarray(tensor, np.float32)


def read_chooses_slow(specs: Sequence[SamplingSpec], vocab: int) -> kernels.Chooses:
    """Return what `kernels.read_chooses` returns: how tokens are chosen, as a pass reads it.

    Edits of ids beyond `vocab` change nothing and are left out.
    """
    edits = [c.edits or _NO_EDITS for c in specs]
    counts = [int(e.ids.searchsorted(vocab)) if len(e.ids) else 0 for e in edits]
    offsets = np.zeros(len(edits) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    keys = [(0, 0) if c.kind == "argmax" else key(c.seed, c.choice, Lane.CHOICE, c.position) for c in specs]
    changed = [(e, n) for e, n in zip(edits, counts, strict=True) if n] or [(_NO_EDITS, 0)]
    return kernels.Chooses(
        np.array([_KINDS[c.kind] for c in specs], np.uint8),
        np.array([c.params.temperature for c in specs], np.float64),
        np.array([(c.params.top_k, c.params.top_p, c.params.min_p) for c in specs], np.float64).reshape(-1, 3),
        np.array(keys, np.uint32).reshape(-1, 2),
        offsets,
        np.concatenate([e.ids[:n] for e, n in changed]),
        np.concatenate([e.scale[:n] for e, n in changed]),
        np.concatenate([e.add[:n] for e, n in changed]),
    )


_NO_EDITS = no_edits()
