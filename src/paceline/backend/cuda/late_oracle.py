"""The oracle on the device: recorded answers as drafts, spoilt to be kept as often as asked. For benchmarks.

See `draft/lookup/oracle.py`. Two tables hold a row's recording: its tokens, and one uniform number for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.backend.cuda.buckets import bucket
from paceline.backend.cuda.device_rows import DeviceRows
from paceline.backend.cuda.late_counts import DraftGraphs, DraftShape, keep_drafts
from paceline.core.nouns import UNCHOSEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float64, generic, int64
    from numpy.typing import NDArray

    from paceline.backend.cuda.late_counts import DraftOrders
    from paceline.backend.seam import LateDraft, LateProgram, RowView


class OracleProgram:
    """Drafts what was recorded; see `LateOracle`."""

    def __init__(
        self,
        rows: RowView,
        rates: NDArray[float64],
        max_answer: int,
        vocab_size: int,
        beside: LateProgram | None = None,
    ) -> None:
        """beside: runs for what it costs; its drafts are replaced."""
        assert isinstance(rows, DeviceRows)
        n, device = rows.num_rows + 1, rows.device
        self._rows, self._vocab_size, self._beside = rows, vocab_size, beside
        self._graphs = DraftGraphs(rows, self._draft_on_device)
        self._rates = torch.from_numpy(rates).to(device)
        self._answers = torch.zeros(n, max_answer, dtype=torch.int64, device=device)
        self._uniform = torch.zeros(n, max_answer, dtype=torch.float64, device=device)
        self._prompt_len = torch.zeros(n, dtype=torch.int64, device=device)
        self._answer_len = torch.zeros(n, dtype=torch.int64, device=device)  # 0: nothing is recorded

    def close(self) -> None:
        """End what runs beside."""
        if self._beside is not None:
            self._beside.close()

    def admit(self, row: int, entries: int, first_key: int) -> None:
        """Begin a row without a recording."""
        self._answer_len[row] = 0
        if self._beside is not None:
            self._beside.admit(row, entries, first_key)

    def record(self, row: int, prompt_len: int, answer: NDArray[int64], uniform: NDArray[float64]) -> None:
        """Set what a row drafts, see `LateOracle`."""
        self._answers[row, : len(answer)] = self._sent(answer)
        self._uniform[row, : len(answer)] = self._sent(uniform)
        self._prompt_len[row] = prompt_len
        self._answer_len[row] = len(answer)

    def _sent(self, array: NDArray[generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._rows.device, non_blocking=True)

    def catch_up(self, counts: Mapping[int, int]) -> None:
        """Let what runs beside catch up."""
        if self._beside is not None:
            self._beside.catch_up(counts)

    def draft(self, drafts: Sequence[LateDraft]) -> None:
        """Go on with the recording of each row whose text is that of the recording."""
        if self._beside is not None:
            self._beside.draft(drafts)
        num_rows, deepest = len(drafts), max(d.depth for d in drafts)
        shape = DraftShape(bucket(num_rows) if self._graphs.pads else num_rows, 0, deepest)
        self._graphs.run(shape, drafts, captured=True)

    def _draft_on_device(self, shape: DraftShape, orders: DraftOrders) -> None:
        state, rows, last = self._rows.on_device, orders.rows, self._answers.shape[1] - 1
        length, count = state.length[rows], self._answer_len[rows]
        start = length - self._prompt_len[rows]
        newest = state.token_ids[rows, (length - 1).clamp(min=0)]
        as_recorded = self._answers[rows, (start - 1).clamp(0, last)] == newest
        goes_on = (start > 0) & (start < count) & as_recorded
        place = torch.arange(shape.deepest, device=rows.device)
        index = start[:, None] + place
        at = rows[:, None], index.clamp(0, last)
        right = self._answers[at]
        spoilt = (right + 1) % self._vocab_size
        rates = self._rates[place.clamp(max=len(self._rates) - 1)]
        token_ids = torch.where(self._uniform[at] < rates, right, spoilt)
        token_ids = torch.where(goes_on[:, None] & (index < count[:, None]), token_ids, UNCHOSEN)
        keep_drafts(state, orders, token_ids, right.new_full(right.shape, torch.nan, dtype=torch.float64))
