"""Surroundings of phases: the device, the sizes, the record, and what earlier phases found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.backend.device import Device
from paceline.backend.registry import backend_spec
from paceline.model.weights import load_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.cuda.decoder import CudaDecoder
    from tools.gpu.record import Record
    from tools.gpu.sizes import Sizes

BACKEND = "cuda"
EXACT, FAST = NUMERICS = ("exact", "fast")


@dataclass(frozen=True, slots=True, eq=False)
class GpuBench:
    """A phase's surroundings."""

    device: torch.device
    sizes: Sizes
    record: Record
    ceilings: Mapping[str, Any]  # results of that phase; empty where it did not run
    asked: frozenset[str] = frozenset()  # phases of the whole run

    @property
    def dtype(self) -> torch.dtype:
        """Type that kernels are checked in, which PyTorch knows on hosts, too."""
        return torch.bfloat16

    def floor_s(self, num_bytes: float, operations: float) -> float | None:
        """Return the least seconds for these bytes and operations; None if not measured."""
        bandwidth: float | None = self.ceilings.get("read_bytes_per_s")
        rate: float | None = self.ceilings.get("matmul_per_s")
        if not bandwidth or not rate:
            return None
        return max(num_bytes / bandwidth, operations / rate)


def load_decoder(
    model: str, weights: str, device: torch.device, *, kv: str | None = None, numerics: str = EXACT
) -> CudaDecoder:
    """Load a model by shape onto a device."""
    spec, loaded = backend_spec(BACKEND), load_model(model)
    weight_type = spec.weight_type(weights)
    load = spec.load(numerics)
    where = Device(torch_name=str(device))
    decoder: Any = load(loaded.config, loaded.weights, weight_type, spec.kv_type(kv, weight_type), None, where)
    found: CudaDecoder = decoder
    return found
