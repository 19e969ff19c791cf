"""Keys and values of every layer, by slot, on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.backend.cuda.device_memory import lazy_zeros
from paceline.core.nouns import PAGE_TOKENS

KV_TYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Keys and values of one layer, by slot; in fp8 they are `data` times `scales`."""

    data: torch.Tensor  # [2, num_slots + 16, num_kv_heads, head_dim]
    scales: torch.Tensor | None = None  # [2, num_slots + 16, num_kv_heads] float32, in fp8 only


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DeviceKV:
    """Keys and values of every layer, by slot; padding tokens write to the last page."""

    data: torch.Tensor  # [num_layers, 2, num_slots + 16, num_kv_heads, head_dim] zeros at first
    scales: torch.Tensor | None = None  # [num_layers, 2, num_slots + 16, num_kv_heads] float32, in fp8 only
    number: int = 0  # number by which other ranks know their parts of this store

    @property
    def num_slots(self) -> int:
        """Tokens that fit; the scratch page begins there."""
        return self.data.shape[2] - PAGE_TOKENS

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers."""
        layers, two, _, heads, head_dim = self.data.shape
        scale_bytes = 0 if self.scales is None else self.scales.element_size()
        return layers * two * heads * (head_dim * self.data.element_size() + scale_bytes)

    def layer(self, index: int) -> LayerKV:
        """Return the views of one layer."""
        return LayerKV(self.data[index], None if self.scales is None else self.scales[index])


def new_kv(
    num_pages: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    kv_type: str,
    dtype: torch.dtype,
    device: torch.device,
) -> DeviceKV:
    """Return an empty store of `num_pages` pages and the scratch page.

    kv_type: one of `KV_TYPES`, or "auto" for the model's `dtype`.
    """
    shape = (num_layers, 2, (num_pages + 1) * PAGE_TOKENS, num_kv_heads, head_dim)
    stored = dtype if kv_type == "auto" else KV_TYPES[kv_type]
    scales = lazy_zeros(shape[:-1], torch.float32, device) if kv_type == "fp8" else None
    return DeviceKV(lazy_zeros(shape, stored, device), scales)
