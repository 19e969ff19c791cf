"""How many numbers a model holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.model.config import tensor_shapes

if TYPE_CHECKING:
    from paceline.model.config import ModelConfig


def num_weights(config: ModelConfig) -> int:
    """Return how many numbers a model holds."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())
