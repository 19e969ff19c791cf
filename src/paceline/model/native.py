"""The `native` backend: C++ kernels for CPUs (csrc/), one call per forward pass, the same bits in every batch."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from paceline import kernels
from paceline.core.noise import Lane, key
from paceline.core.sampling import no_edits
from paceline.model.backend import Chosen, num_cores
from paceline.model.choosing import logit_rows
from paceline.model.config import ModelConfig, layer_shapes
from paceline.model.rope import inverse_frequencies

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.core.nouns import Choose
    from paceline.model.backend import KV
    from paceline.model.gguf_file import FourBit
    from paceline.model.packed import Packed

_KINDS = {"argmax": 0, "noisy": 1, "logits": 2, "sampled": 3}  # as csrc/decoder.h


_TABLE_TYPES = {"int4": "int8"}  # of embedding and head, where four bits would cost too much of the choice


@runtime_checkable
class _KeepsBlocks(Protocol):
    def four_bit(self, name: str) -> FourBit | None: ...


def load_decoder(
    config: ModelConfig,
    weights: Mapping[str, NDArray[floating]],
    weight_type: str,
    kv_type: str,
    threads: int | None,
) -> NativeDecoder:
    """Make a decoder, see `engine/backends.py`."""
    return NativeDecoder(config, weights, _team(threads or num_cores()), weight_type, kv_type)


@lru_cache
def _team(num_threads: int) -> kernels.Team:
    """Return the process's team of so many threads: target and drafter never run at once."""
    return kernels.Team(num_threads)


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
        """Pack the tensors named by `tensor_shapes(config)`; `team` is shared by all decoders of a process."""
        config.check()
        self.config = config
        self._weight_type, self._kv_type = weight_type, kv_type
        pack = partial(_pack, weights)
        table_type = _TABLE_TYPES.get(weight_type, weight_type)
        embed = pack("embed", table_type)
        factors = weights["rope_factors"] if config.rope.scaling == "factors" else None
        names = layer_shapes(config)
        matrices = [name for name, shape in names.items() if len(shape) == 2]
        vectors = [name for name, shape in names.items() if len(shape) == 1]
        self._decoder = kernels.Decoder(
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            team=team,
            embed=embed,
            head=embed if config.tie_embeddings else pack("head", table_type),
            final_norm=_array(weights["final_norm"]),
            inverse_frequencies=inverse_frequencies(config.rope, config.head_dim, factors),
            layers=[
                (
                    {n: pack(f"layers.{i}.{n}", weight_type) for n in matrices},
                    {n: _array(weights[f"layers.{i}.{n}"]) for n in vectors},
                )
                for i in range(config.num_layers)
            ],
        )

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self.name}, {self._weight_type} weights, {self._kv_type} KV, {kernels.isa()}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return self._decoder.weight_bytes

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> kernels.KVStore:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        c = self.config
        return kernels.KVStore(self._kv_type, num_layers or c.num_layers, num_pages, c.num_kv_heads, c.head_dim)

    def run(
        self,
        packed: Packed,
        kv: KV,
        chooses: Sequence[Choose],
        *,
        num_layers: int | None = None,
        vocab_size: int | None = None,
        taps: Sequence[int] = (),
    ) -> Chosen:
        """Run a pass and choose its tokens, see `backend.Decoder`."""
        assert isinstance(kv, kernels.KVStore)
        vocab = min(vocab_size or self.config.vocab_size, self.config.vocab_size)
        logit_idx = logit_rows(chooses)
        num_logit_rows = int(logit_idx.max(initial=-1)) + 1
        logits = np.empty((num_logit_rows, vocab), np.float32)
        chosen = np.empty(len(packed.wanted), np.int64)
        tapped = np.empty((len(taps), len(packed.token_ids), self.config.hidden_size), np.float32)
        self._decoder.forward(
            kv,
            packed.token_ids,
            packed.positions,
            packed.slots,
            packed.cu_len,
            np.ascontiguousarray(packed.pages),
            packed.wanted,
            _choose_arrays(chooses, vocab),
            vocab=vocab,
            num_layers=num_layers or self.config.num_layers,
            tap_layers=list(taps),
            taps=tapped,
            chosen=chosen,
            logits=logits,
        )
        states = dict(zip(taps, tapped, strict=True))
        if not num_logit_rows:
            return Chosen(chosen, None, None, states)
        missing = (vocab_size or vocab) - vocab  # the target's padding rows
        padded = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf) if missing else logits
        return Chosen(chosen, padded, logit_idx, states)


def _pack(weights: Mapping[str, NDArray[floating]], name: str, weight_type: str) -> kernels.Matrix:
    """Pack one matrix; one that its file keeps in 4-bit blocks of 32 keeps them if 4 bits are wanted."""
    blocks = weights.four_bit(name) if weight_type == "int4" and isinstance(weights, _KeepsBlocks) else None
    if blocks is None:
        return kernels.pack(_array(weights[name]), weight_type)
    return kernels.pack_int4(blocks.values, blocks.scales.view(np.uint16), blocks.minima.view(np.uint16))


def _array(tensor: NDArray[floating]) -> NDArray[float32]:
    return np.ascontiguousarray(tensor, np.float32)


def _choose_arrays(chooses: Sequence[Choose], vocab: int) -> kernels.Chooses:
    """Return how tokens are chosen, as arrays. Edits of ids beyond `vocab` change nothing and are left out."""
    edits = [c.edits or _NO_EDITS for c in chooses]
    counts = [int(e.ids.searchsorted(vocab)) if len(e.ids) else 0 for e in edits]
    offsets = np.zeros(len(edits) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    keys = [(0, 0) if c.kind == "argmax" else key(c.seed, c.choice, Lane.CHOICE, c.position) for c in chooses]
    changed = [(e, n) for e, n in zip(edits, counts, strict=True) if n] or [(_NO_EDITS, 0)]
    return kernels.Chooses(
        np.array([_KINDS[c.kind] for c in chooses], np.uint8),
        np.array([c.params.temperature for c in chooses], np.float64),
        np.array([(c.params.top_k, c.params.top_p, c.params.min_p) for c in chooses], np.float64).reshape(-1, 3),
        np.array(keys, np.uint32).reshape(-1, 2),
        offsets,
        np.concatenate([e.ids[:n] for e, n in changed]),
        np.concatenate([e.scale[:n] for e, n in changed]),
        np.concatenate([e.add[:n] for e, n in changed]),
    )


_NO_EDITS = no_edits()
