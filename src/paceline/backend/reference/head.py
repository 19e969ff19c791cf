"""Draft heads on the `reference` backend: the readable forward pass over paged keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paceline.backend.draft_weights import check_target_type
from paceline.backend.reference import head_layers as forward
from paceline.backend.reference.attention import KVStore, attend, lazy_zeros, plan_tiles
from paceline.backend.reference.decoder import ReferenceDecoder, choose_from, to_numpy, torch_device
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.packed import Packed
    from paceline.backend.seam import KV, Decoder, SampledTokens
    from paceline.core.nouns import SamplingSpec
    from paceline.model.heads.checkpoint import Head


def load_runner(head: Head, target: Decoder, device: Device | None, weight_type: str | None) -> ReferenceHead:
    """Make a head's runner, see `backend/registry.py`."""
    assert isinstance(target, ReferenceDecoder)
    check_target_type(weight_type)
    return ReferenceHead(head, target, device)


class ReferenceHead:
    """A head in the target's type, on its device or another."""

    in_turn = None  # every pass is a call

    def __init__(self, head: Head, target: ReferenceDecoder, device: Device | None = None) -> None:
        self.config = head.config
        self.weight_type = str(target.dtype).removeprefix("torch.")
        self._dtype, self._device = target.dtype, target.device if device is None else torch_device(device)
        self._weights = {name: self._take(tensor) for name, tensor in head.weights.items()}
        self._embed = self._weights.pop("embed", target.embed.to(self._device))  # [vocab, width]
        self._token_ids = torch.from_numpy(head.token_ids).to(self._device)  # [draft_vocab_size]
        if head.config.algorithm.guesses_features:
            head_rows = target.head[self._token_ids.to(target.device)].to(self._device)
            self._weights |= {"head": head_rows, "target_norm": target.final_norm.to(self._device)}
        self._vocab_size = target.config.vocab_size
        self._target, self._fixed = target, (self._weights["head"], self._token_ids)

    def _take(self, array: NDArray[floating]) -> torch.Tensor:
        return torch.as_tensor(array).to(device=self._device, dtype=self._dtype)

    def write_also(self, own_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `HeadRunner`."""
        rows, fixed_ids = self._fixed
        ids = torch.from_numpy(own_ids)
        own = self._target.head[ids.to(self._target.device)].to(rows)
        self._weights["head"], self._token_ids = torch.cat([rows, own]), torch.cat([fixed_ids, ids.to(fixed_ids)])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._weights.values())

    def new_kv(self, num_pages: int) -> KVStore:
        """Return an empty store of `num_pages` pages for the head's layers."""
        c = self.config.layers
        shape = (c.num_layers, 2, num_pages * PAGE_TOKENS, c.num_kv_heads, c.head_dim)
        return KVStore(lazy_zeros(shape, self._dtype, self._device))

    @torch.inference_mode()
    def fuse(self, tapped: NDArray[floating]) -> NDArray[floating]:
        """Return the feature of each token, see `HeadRunner`."""
        return to_numpy(forward.fuse(self.config, self._weights, self._take(tapped)))

    @torch.inference_mode()
    def run(
        self, packed: Packed, features: NDArray[floating], kv: KV, specs: Sequence[SamplingSpec]
    ) -> tuple[SampledTokens, NDArray[floating]]:
        """Run a pass, see `HeadRunner`."""
        assert isinstance(kv, KVStore)
        c, data = self.config.layers, kv.data
        slots = torch.from_numpy(packed.slots).to(self._device)
        tiles = plan_tiles(packed, c.num_heads // c.num_kv_heads, self._device)

        def paged(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            data[layer, 0].index_copy_(0, slots, key)
            data[layer, 1].index_copy_(0, slots, value)
            return attend(query, data[layer], tiles)

        embedded = functional.embedding(torch.from_numpy(packed.token_ids).to(self._device), self._embed)
        positions = torch.from_numpy(packed.positions).to(self._device)
        hidden = forward.run_layers(self.config, self._weights, embedded, self._take(features), positions, paged)
        wanted = hidden[torch.from_numpy(packed.wanted).to(self._device)]
        logits, fed_back = forward.read_out(self.config, self._weights, wanted)
        return self._choose(logits, specs), to_numpy(fed_back)

    @torch.inference_mode()
    def relay(
        self,
        first: NDArray[floating],
        normed: NDArray[floating],
        known: tuple[NDArray[int64], NDArray[floating]] | None,
        specs: Sequence[SamplingSpec],
    ) -> tuple[SampledTokens, NDArray[floating]]:
        """Tell guesses of those before them, see `HeadRunner`."""
        states, before = self._take(normed), None
        if known is not None:
            token_ids = torch.from_numpy(known[0]).to(self._device)
            before = functional.embedding(token_ids, self._embed), self._take(known[1])
        told = forward.relay(self.config, self._weights, self._take(first), states, before)
        states = states[: len(specs)] + forward.relayed(self._weights, told[: len(specs)])
        return self._choose(functional.linear(states, self._weights["head"]), specs), to_numpy(told)

    def _choose(self, logits: torch.Tensor, specs: Sequence[SamplingSpec]) -> SampledTokens:
        """Choose by rows of the draft vocabulary's logits."""
        spread = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        spread[:, self._token_ids] = logits
        return choose_from(spread, specs)
