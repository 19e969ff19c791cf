"""The record of a step: its results for the host, copied beside the next step."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


def begin_record(device: torch.device, draftings: Sequence[DeviceSpan] = ()) -> Record:
    """Return the record of a step that is about to be enqueued.

    draftings: draftings for the step, on the device.
    """
    return Record() if device.type == "cpu" else StreamRecord(draftings)


class DeviceSpan:
    """Time on a GPU between two places of its stream."""

    def __init__(self) -> None:
        self._begun, self._ended = _event(), _event()
        self._begun.record()

    def end(self) -> None:
        """End here."""
        self._ended.record()

    def seconds(self) -> float:
        """Return the time, once the device has passed its end."""
        return float(self._begun.elapsed_time(self._ended)) / 1e3


class Record:
    """Record of a step that ran on the host: its tensors are there already."""

    def __init__(self) -> None:
        self.taps: Mapping[int, Any] = {}  # taps, which stay on the device
        self.seconds = self.draft_s = 0.0  # of the step and its drafting on the device
        self._tensors: dict[str, torch.Tensor] = {}
        self._begun_s = perf_counter()

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a tensor for the host."""
        self._tensors[name] = tensor

    def end(self, taps: Mapping[int, torch.Tensor]) -> None:
        """Note that all of the step is enqueued."""
        self.taps = taps
        self.seconds = perf_counter() - self._begun_s

    def wait(self) -> None:
        """Wait until the tensors are on the host."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> NDArray[Any]:
        array: NDArray[Any] = self._tensors[name].numpy()
        return array


class StreamRecord(Record):
    """Record of a step on a GPU: copied to pinned memory, complete at an event."""

    def __init__(self, draftings: Sequence[DeviceSpan]) -> None:
        super().__init__()
        self._draftings, self._span, self._copied = draftings, DeviceSpan(), _event()

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to pinned memory of the host."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._tensors[name] = pinned.copy_(tensor, non_blocking=True)

    def end(self, taps: Mapping[int, torch.Tensor]) -> None:
        """Note that all of the step is enqueued."""
        self.taps = taps
        self._span.end()
        self._copied.record()

    def wait(self) -> None:
        """Wait for the step's own event, not for later steps."""
        self._copied.synchronize()
        self.seconds, self.draft_s = self._span.seconds(), sum(span.seconds() for span in self._draftings)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
