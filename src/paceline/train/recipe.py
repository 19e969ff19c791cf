"""What the trainer asks of whatever it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.train.batch import TrainBatch
    from paceline.train.drafts import Depth


class Recipe(Protocol):
    """A drafter in training."""

    num_steps: int  # depths that are trained
    weights: dict[str, torch.Tensor]  # what is trained, float32, by canonical name
    taken_over: set[str]  # names of the weights that `start_from` brought

    def written(self, own_ids: torch.Tensor) -> torch.Tensor:
        """Return what turns guesses into logits [draft_vocab + num_own, width], `own_ids` last."""
        ...

    def guess(self, batch: TrainBatch, depths: Sequence[Depth]) -> list[torch.Tensor]:
        """Return what is multiplied with what is `written`, [m, width] for the drafts of each depth."""
        ...

    def start_from(self, folder: Path) -> str:
        """Take over what a trained drafter has in common with this one; return the hash of its file.

        Raises `ModelError`, `DrafterMismatch`.
        """
        ...

    def export(self) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
        """Return config.json and the tensors of the drafter's folder, float32, by the names there."""
        ...


def take_over(weights: Mapping[str, torch.Tensor], trained: Mapping[str, NDArray[floating]]) -> set[str]:
    """Copy what has the same name and shape into the weights; return the names."""
    names = {n for n, ours in weights.items() if n in trained and trained[n].shape == tuple(ours.shape)}
    for name in names:
        weights[name].copy_(torch.tensor(trained[name]))
    return names
