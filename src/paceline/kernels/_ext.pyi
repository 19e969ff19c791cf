"""The compiled kernels, see csrc/binding.cpp. Arrays are C-contiguous; every argument is checked there."""

from typing import Any

from numpy import float32, floating, int64
from numpy.typing import NDArray

def isa() -> str: ...
def gumbel(k0: int, k1: int, id: int) -> float: ...  # noqa: A002
def choose(
    logits: NDArray[floating[Any]],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    edit_ids: NDArray[int64],
    edit_scale: NDArray[float32],
    edit_add: NDArray[float32],
    k0: int,
    k1: int,
) -> int: ...
def keep(z: NDArray[floating[Any]], top_k: int, top_p: float, min_p: float) -> list[int]: ...
def logprobs(
    logits: NDArray[floating[Any]], token_id: int, num_top: int
) -> tuple[float, list[int], list[float]]: ...
