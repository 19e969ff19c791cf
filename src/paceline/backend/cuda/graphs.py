"""CUDA graphs of functions of tensors."""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache
from threading import RLock
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from paceline.backend.cuda.device_memory import sendable
from paceline.backend.cuda.ranks import captured_together, replayed_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")
_devices: WeakKeyDictionary[torch.cuda.CUDAGraph, torch.device] = (
    WeakKeyDictionary()
)  # graphs of each device, which share memory
_broken: list[torch.cuda.CUDAGraph] = []  # kept alive, as PyTorch may still point to their memory
_one_at_a_time = RLock()


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Record in a graph what is launched within, one at a time.

    Graphs of a device share memory. After an error, later graphs share no memory with earlier ones.
    """
    with _one_at_a_time:
        others = [other for other, its in _devices.items() if its == device]
        pool = others[0].pool() if others else None  # PyTorch refuses the pool once all its graphs are gone
        torch.cuda.synchronize(device)
        before = torch.cuda.current_stream(device)
        stream = _stream_on(device)
        try:
            # thread_local: other threads may use the device during the capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            torch.cuda.set_stream(before)  # otherwise PyTorch stays on the capture's stream and memory
            _broken.append(graph)
            _devices.clear()
            raise
        _devices[graph] = device


@lru_cache
def _stream_on(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device.

    PyTorch's own choice is a stream of the device that captured first.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Graph(Generic[T]):
    """Captured function: run again, it reads new inputs and overwrites its outputs."""

    def __init__(self, function: Callable[..., T], inputs: Sequence[torch.Tensor]) -> None:
        """Capture a function, after a first run that compiles its kernels.

        inputs: on the device; a run with them must do no harm.
        """
        self._inputs = [tensor.clone() for tensor in inputs]
        function(*self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        with captured_together() as self._followed, recorded(self._graph, inputs[0].device):
            self._outputs = function(*self._inputs)

    def __call__(self, *inputs: torch.Tensor) -> T:
        """Copy inputs from host or device and replay. Outputs are valid until any graph runs."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(sendable(given, own.device), non_blocking=True)
        with replayed_together(self._followed):
            self._graph.replay()
        return self._outputs


class Uncaptured(Generic[T]):
    """Stand-in for `Graph` on a device without graphs: inputs are copied, nothing is captured."""

    def __init__(self, function: Callable[..., T], inputs: Sequence[torch.Tensor]) -> None:
        self._function, self._inputs = function, [tensor.clone() for tensor in inputs]

    def __call__(self, *inputs: torch.Tensor) -> T:
        """Copy the inputs and run the function."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        return self._function(*self._inputs)
