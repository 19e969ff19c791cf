"""Weights as kernels of products read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.backend.cuda.kernel_launch import cdiv

if TYPE_CHECKING:
    import torch

Kind = Literal["plain", "fp8", "int4"]
SUM_BYTES = 8  # bytes of writing and reading the sum of one segment


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Weights [N, K] as kernels read them."""

    kind: Kind
    data: torch.Tensor  # plain: [N, K]; fp8: [N, K] e4m3; int4: [N, groups * 64] uint8, see `products`
    scale: torch.Tensor | None  # float32; fp8: [N]; int4: [groups, N]
    bias: torch.Tensor | None  # [N] of the model's type
    shape: tuple[int, int]  # N, K
    segment: int  # weights of a row whose products are summed by themselves

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.data, self.scale, self.bias) if t is not None)

    @property
    def num_segments(self) -> int:
        """Segments of a row."""
        return max(cdiv(self.shape[1], self.segment), 1)
