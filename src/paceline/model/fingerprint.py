"""What a model is, whatever file it came from."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy import floating
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig


def fingerprint(config: ModelConfig, final_norm: NDArray[floating]) -> str:
    """Return a name of a model's own: its shape, and a hash of the one tensor that no quantisation touches.

    So a model is the same as a folder and as a GGUF file, and another as its base or as a finetune of it.
    """
    digest = hashlib.sha256(np.ascontiguousarray(final_norm, np.float32).tobytes()).hexdigest()[:12]
    return f"{config.family}-{config.num_layers}x{config.hidden_size}-{config.vocab_size}-{digest}"
