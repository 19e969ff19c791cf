"""CUDA graphs of functions of tensors."""

from __future__ import annotations

from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from weakref import WeakSet

import torch

from paceline.backend.cuda.device_memory import sendable
from paceline.backend.cuda.ranks import captured_together, replayed_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")


class Graph(Generic[T]):
    """Captured function: run again, it reads new inputs and overwrites its outputs."""

    _alive: ClassVar[WeakSet[Graph[Any]]] = WeakSet()  # those of a device share memory
    _broken: ClassVar[list[torch.cuda.CUDAGraph]] = []  # whose memory PyTorch may still point to
    _one_at_a_time: ClassVar[RLock] = RLock()

    def __init__(self, function: Callable[..., T], inputs: Sequence[torch.Tensor]) -> None:
        """Capture a function, after a first run that compiles its kernels.

        inputs: on the device; to run with them must do no harm.
        """
        self._device = inputs[0].device
        self._inputs = [tensor.clone() for tensor in inputs]
        function(*self._inputs)
        self._graph: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph()
        with self._one_at_a_time, captured_together() as self._followed, self._recorded():
            self._outputs = function(*self._inputs)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record what is launched within.

        After an error, later graphs share no memory with earlier ones.
        """
        others: list[Graph[Any]] = [graph for graph in self._alive if graph._device == self._device]
        pool = others[0]._graph.pool() if others else None  # PyTorch refuses that of graphs which are all gone
        torch.cuda.synchronize(self._device)
        before = torch.cuda.current_stream(self._device)
        try:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                yield
        except BaseException:
            torch.cuda.set_stream(before)  # PyTorch leaves that of the capture, and goes on filling its memory
            self._broken.append(self._graph)
            self._alive.clear()
            raise
        self._alive.add(self)

    def __call__(self, *inputs: torch.Tensor) -> T:
        """Copy inputs from host or device and replay. Outputs hold until any graph runs."""
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
