"""What the trainer asks of whatever it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from paceline.train.batch import Batch
    from paceline.train.drafts import Depth


class Recipe(Protocol):
    """A drafter in training."""

    num_steps: int  # depths that are trained
    weights: dict[str, torch.Tensor]  # what is trained, float32, by canonical name

    def written(self, own_ids: torch.Tensor) -> torch.Tensor:
        """Return what turns guesses into logits [draft_vocab + num_own, width], `own_ids` last."""
        ...

    def guess(self, batch: Batch, depths: Sequence[Depth]) -> list[torch.Tensor]:
        """Return what is multiplied with what is `written`, [m, width] for the drafts of each depth."""
        ...

    def export(self) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
        """Return config.json and the tensors of the drafter's folder, float32, by the names there."""
        ...
