"""A decoder as late drafter: a draft model over the target's page table, or the target's own first layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backend.cuda.attention import DeviceKV
from paceline.backend.cuda.device_rows import DeviceRows
from paceline.backend.cuda.late_program import Program

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from paceline.backend.cuda.decoder import CudaDecoder
    from paceline.backend.cuda.late_program import LateInput
    from paceline.backend.seam import KV, RowView


class LateModel:
    """Runs a decoder's passes for `Program`; see `LateRunner`."""

    draft_ids = None
    parallel = False

    def __init__(self, decoder: CudaDecoder, kv: DeviceKV, num_layers: int | None, vocab_size: int) -> None:
        self._decoder, self._kv = decoder, kv
        self._num_layers, self._vocab_size = num_layers, vocab_size

    def run_late(self, asked: LateInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a pass over the tokens alone."""
        hidden, _ = self._decoder.forward(asked.tokens, self._kv, num_layers=self._num_layers)
        return self._decoder.logits(hidden)[:, : self._vocab_size], None

    def write_taps(self, taps: Mapping[int, torch.Tensor], slots: torch.Tensor) -> None:
        """Ignore them: a model reads tokens."""


def late_model(
    decoder: CudaDecoder, rows: RowView, kv: KV, num_layers: int | None, vocab_size: int, *, own_store: bool
) -> Program:
    """Return a program. own_store: False for a decoder whose keys and values are the target's."""
    assert isinstance(rows, DeviceRows)
    assert isinstance(kv, DeviceKV)
    runner = LateModel(decoder, kv, num_layers, vocab_size)
    return Program(rows, runner, kv.num_slots, own_store=own_store)
