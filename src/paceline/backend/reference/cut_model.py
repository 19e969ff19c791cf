"""Draft models on the `reference` backend: the readable forward pass over the target's own tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.backend.draft_weights import check_target_type
from paceline.backend.reference.attention import KVStore
from paceline.backend.reference.decoder import ReferenceDecoder, choose_from, to_numpy, torch_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.packed import Packed
    from paceline.backend.seam import KV, Decoder, SampledTokens
    from paceline.core.nouns import SamplingSpec
    from paceline.model.heads.cut_model import SmallModel


def load_decoder(
    small: SmallModel, target: Decoder, device: Device | None, weight_type: str | None
) -> ReferenceSmall:
    """Make a draft model's decoder, see `backend/registry.py`."""
    assert isinstance(target, ReferenceDecoder)
    check_target_type(weight_type)
    return ReferenceSmall(small, target, device)


class ReferenceSmall:
    """A `Decoder` in the target's type that chooses among some of the target's tokens."""

    name = ReferenceDecoder.name
    beside = None  # every pass is a call
    in_turn = None  # and so is every one of several

    def __init__(self, small: SmallModel, target: ReferenceDecoder, device: Device | None = None) -> None:
        self.config = small.config
        self.weight_type = str(target.dtype).removeprefix("torch.")
        self._target, self._fixed_ids = target, torch.from_numpy(small.token_ids).to(target.device)
        self._token_ids = self._fixed_ids  # [draft_vocab] and own ones
        tables = {"embed": target.embed, "head": target.head[self._token_ids]}
        untied = replace(small.config, tie_embeddings=False)
        weights = {**small.weights, **tables}
        where = target.device if device is None else torch_device(device)
        self._decoder = ReferenceDecoder(untied, weights, target.dtype, where)  # type: ignore[arg-type]

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self._decoder.describe()}, {len(self._token_ids)} tokens"

    def write_also(self, own_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `SmallDecoder`."""
        self._token_ids = torch.cat([self._fixed_ids, torch.from_numpy(own_ids).to(self._fixed_ids)])
        self._decoder.head = self._target.head[self._token_ids].to(self._decoder.head)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, without the embedding, which is the target's."""
        return self._decoder.weight_bytes - self._decoder.embed.nbytes

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> KVStore:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        return self._decoder.new_kv(num_pages, num_layers)

    @torch.inference_mode()
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
        """Run a pass and choose among its tokens, ids being the target's, see `backend.Decoder`."""
        assert isinstance(kv, KVStore)
        hidden, tapped = self._decoder.forward(packed, kv, num_layers=num_layers, taps=taps)
        spread = hidden.new_full((len(hidden), self.config.vocab_size), -torch.inf)
        spread[:, self._token_ids] = self._decoder.logits(hidden)
        chosen = choose_from(spread, specs)
        return replace(chosen, taps={tap: to_numpy(states) for tap, states in tapped.items()})
