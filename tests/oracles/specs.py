"""The readable twin of `kernels.read_chooses`: sampling specs as a pass reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.core.noise import Lane, key
from paceline.core.sampling import no_edits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import SamplingSpec

_KINDS = {"argmax": 0, "noisy": 1, "logits": 2, "sampled": 3}  # as in csrc


def read_specs(specs: Sequence[SamplingSpec], vocab: int) -> kernels.Chooses:
    """Edits of ids beyond `vocab` change nothing and are left out."""
    none = no_edits()
    edits = [c.edits or none for c in specs]
    counts = [int(e.ids.searchsorted(vocab)) if len(e.ids) else 0 for e in edits]
    offsets = np.zeros(len(edits) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    keys = [(0, 0) if c.kind == "argmax" else key(c.seed, c.choice, Lane.CHOICE, c.position) for c in specs]
    changed = [(e, n) for e, n in zip(edits, counts, strict=True) if n] or [(none, 0)]
    return kernels.Chooses(
        np.array([_KINDS[c.kind] for c in specs], np.uint8),
        np.array([c.params.temperature for c in specs], np.float64),
        np.array([(c.params.top_k, c.params.top_p, c.params.min_p) for c in specs], np.float64).reshape(-1, 3),
        np.array(keys, np.uint32).reshape(-1, 2),
        offsets,
        np.concatenate([e.ids[:n] for e, n in changed]),
        np.concatenate([e.scale[:n] for e, n in changed]),
        np.concatenate([e.add[:n] for e, n in changed]),
    )
