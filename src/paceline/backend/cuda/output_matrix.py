"""The output matrix: logits in full, and rows of a draft vocabulary's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from paceline.backend.cuda.device_memory import send
from paceline.backend.cuda.device_weights import first_rows, matrix_rows
from paceline.backend.cuda.kernel_launch import uses_kernels
from paceline.backend.cuda.pass_choice import DraftTokens
from paceline.backend.cuda.products import Parts, kernel_product, multiply
from paceline.backend.cuda.ranks import in_order
from paceline.backend.seam import MAX_REQUEST_TOKENS

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.cuda.device_weights import Setup, WeightReader
    from paceline.backend.cuda.matrix import Matrix
    from paceline.backend.cuda.ranks import Lead

_ROWS_AT_ONCE = 1 << 14  # rows of 16-bit weights that a host widens at once


def wide_product(x: torch.Tensor, m: Matrix) -> torch.Tensor:
    """Multiply tokens [n, K] by a matrix; return [n, N] that are not rounded.

    float32, or float64 of float64 tokens. The sums are those of `multiply` before it rounds: of 16-bit logits
    many would be equal.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if uses_kernels(x):
        parts = kernel_product(x, m, parallel=True)
        assert isinstance(parts, Parts)
        total = parts.sums[0]
        for part in parts.sums[1:]:
            total = total + part
        return total
    if m.kind != "plain" or x.dtype == wide:
        product = multiply(x, m)
        assert isinstance(product, torch.Tensor)
        return product.to(wide)
    tokens = x.to(wide)
    pieces = torch.split(m.data, _ROWS_AT_ONCE)
    return torch.cat([functional.linear(tokens, rows.to(wide)) for rows in pieces], dim=-1)


class OutputMatrix:
    """Output matrix of a target or draft model: whole, or rank 0's rows of it."""

    def __init__(self, matrix: Matrix, num_tokens: int, lead: Lead | None = None) -> None:
        """num_tokens: rows of the whole matrix. lead: given if other ranks have rows."""
        self.matrix, self.num_tokens = matrix, num_tokens
        self._lead = lead

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return raw logits [n, num_tokens] of normed states [n, width], see `wide_product`."""
        lead = self._lead
        if lead is None:
            return wide_product(normed, self.matrix)
        with lead.together("logits", (normed,)):
            parts = lead.collect(wide_product(normed, self.matrix))
        assert parts is not None
        return parts.transpose(0, 1).flatten(1)[:, : self.num_tokens]

    def rows(self, token_ids: NDArray[int64], setup: Setup) -> torch.Tensor:
        """Return the rows [n, width] of tokens, on a setup's device in its type."""
        ids, lead = send(token_ids, self.matrix.data.device), self._lead
        if lead is None:
            return matrix_rows(self.matrix, ids, setup.dtype).to(setup.device)
        with lead.together("rows", (ids,)):
            rows = lead.gather(own_rows(self.matrix, ids, lead.rank)[None])
        return in_order(rows).to(setup.device, setup.dtype)


def own_rows(part: Matrix, token_ids: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a rank's rows [n, width] of tokens, zeros for others'. float32 or wider."""
    at = token_ids - rank * part.shape[0]
    mine = (at >= 0) & (at < part.shape[0])
    wide = torch.promote_types(part.data.dtype if part.kind == "plain" else torch.float32, torch.float32)
    rows = matrix_rows(part, at.clamp(0, part.shape[0] - 1), wide)
    return torch.where(mine[:, None], rows, 0)


class DraftOutput:
    """Output matrix of a draft vocabulary, with room for tokens of requests."""

    def __init__(
        self, reader: WeightReader, rows: torch.Tensor, token_ids: NDArray[int64], target: OutputMatrix, room: int
    ) -> None:
        """rows: [num_tokens, width] of these tokens. room: places for request tokens."""
        assert room <= MAX_REQUEST_TOKENS
        self._reader, self._target, self._fixed_ids = reader, target, token_ids
        wide = torch.cat([rows, rows.new_zeros(room, rows.shape[1])]) if room else rows
        self.whole = reader.packed(wide, reader.setup.output_type)
        self.matrix = self.whole
        self.tokens = DraftTokens(torch.empty(0), token_ids)
        # Ids of all rows, for programs whose shapes must not change; -1 where a row has no token now.
        self.whole_ids = torch.full((len(wide),), -1, dtype=torch.int64, device=reader.setup.device)
        self._take(token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that it writes now."""
        return len(self.tokens.ids)

    def set_request_tokens(self, token_ids: NDArray[int64]) -> None:
        """Write these tokens, too, with the target's rows, see `DraftExecutor`."""
        num_fixed, data = len(self._fixed_ids), self.whole.data
        assert num_fixed + len(token_ids) <= len(data), "more tokens than there is room for"
        if len(token_ids):
            rows = self._target.rows(token_ids, self._reader.setup)
            packed = self._reader.packed(rows, self._reader.setup.output_type)
            data[num_fixed : num_fixed + len(token_ids)] = packed.data
            if packed.scale is not None and self.whole.scale is not None:
                self.whole.scale[num_fixed : num_fixed + len(token_ids)] = packed.scale
        self._take(np.concatenate([self._fixed_ids, token_ids]))

    def _take(self, token_ids: NDArray[int64]) -> None:
        """Make the first rows stand for these tokens."""
        rows = np.full(self._target.num_tokens, -1, np.int64)
        rows[token_ids] = np.arange(len(token_ids))
        self.tokens = DraftTokens(send(token_ids, self._reader.setup.device), rows)
        self.whole_ids[: len(token_ids)] = self.tokens.ids
        self.whole_ids[len(token_ids) :] = -1
        self.matrix = first_rows(self.whole, len(token_ids))
