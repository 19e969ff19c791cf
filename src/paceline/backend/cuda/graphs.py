"""CUDA graphs of functions of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]


class Graph(Generic[T]):
    """A function that was captured: run again, it reads new inputs and writes the same outputs."""

    _pools: ClassVar[dict[torch.device, Any]] = {}  # memory that all graphs of a device share

    def __init__(self, function: Callable[..., T], inputs: Sequence[torch.Tensor]) -> None:
        """Capture it, after a first run that compiles its kernels. inputs: on the device, harmless to run with."""
        device = inputs[0].device
        pool = self._pools.setdefault(device, torch.cuda.graph_pool_handle())
        self._inputs = [tensor.clone() for tensor in inputs]
        function(*self._inputs)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._outputs = function(*self._inputs)

    def __call__(self, *inputs: torch.Tensor) -> T:
        """Copy the inputs, which may be on the host, and replay. Outputs hold until the next call."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs


class Uncaptured(Generic[T]):
    """What stands for a `Graph` on a device without graphs: the same memory for inputs, run as it is."""

    def __init__(self, function: Callable[..., T], inputs: Sequence[torch.Tensor]) -> None:
        self._function, self._inputs = function, [tensor.clone() for tensor in inputs]

    def __call__(self, *inputs: torch.Tensor) -> T:
        """Copy the inputs and run the function."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        return self._function(*self._inputs)
