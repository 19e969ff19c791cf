"""State of rows on a device, and what the device hears of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.backend.cuda.choice import ChoiceSpecs
from paceline.core.nouns import PAGE_TOKENS, noun

MAX_DRAFTS = 16  # drafts of a row that the device has room for


@dataclass(slots=True, eq=False)
class RowTensors:
    """State of every row on the device, int64 unless noted; the last row is padding's."""

    token_ids: torch.Tensor  # [num_rows + 1, max_len]
    pages: torch.Tensor  # [num_rows + 1, max_pages]
    length: torch.Tensor  # [num_rows + 1] committed tokens
    computed: torch.Tensor  # [num_rows + 1] tokens whose target KV is there
    sampling: torch.Tensor  # [num_rows + 1, 4] seed's low and high word, choice, 1 where the device chooses
    temperature: torch.Tensor  # [num_rows + 1] float64
    drafts: torch.Tensor  # [num_rows + 1, MAX_DRAFTS]
    margins: torch.Tensor  # [num_rows + 1, MAX_DRAFTS] float64, NaN where not known
    alive: torch.Tensor  # [num_rows + 1, MAX_DRAFTS] float64 chance that all drafts up to each are kept
    num_drafts: torch.Tensor  # [num_rows + 1]

    @classmethod
    def empty(cls, num_rows: int, max_len: int, device: torch.device) -> RowTensors:
        """Return the state of `num_rows` rows without requests."""
        n = num_rows + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(n, max_len),
            pages=zeros(n, -(-max_len // PAGE_TOKENS)),
            length=zeros(n),
            computed=zeros(n),
            sampling=zeros(n, 4),
            temperature=zeros(n, dtype=torch.float64),
            drafts=zeros(n, MAX_DRAFTS),
            margins=zeros(n, MAX_DRAFTS, dtype=torch.float64),
            alive=zeros(n, MAX_DRAFTS, dtype=torch.float64),
            num_drafts=zeros(n),
        )

    def specs(self, rows: torch.Tensor, positions: torch.Tensor) -> ChoiceSpecs:
        """Return the target's own choices at positions of rows. [n] each"""
        seed_lo, seed_hi, choice, _ = self.sampling[rows].t().contiguous()
        return ChoiceSpecs(
            seed_lo=seed_lo,
            seed_hi=seed_hi,
            choice=choice,
            position=positions,
            temperature=self.temperature[rows],
        )


@noun
class StepRows:
    """Rows of one step on the device, as the host knows them: bounds, never outcomes."""

    rows: torch.Tensor  # [num_rows] padding: the last row
    num_known: torch.Tensor  # [num_rows] committed tokens that the pass computes
    max_drafts: torch.Tensor  # [num_rows] upper bound of the drafts it scores
    samples: torch.Tensor  # [num_rows] 1 where the pass yields a token
