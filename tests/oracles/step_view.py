"""Readable twin of `kernels.draft_bounds`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.engine.request_state import RequestState


def bounds_of(decoding: Sequence[RequestState]) -> NDArray[int64]:
    """Return rows, lengths and the drafts that each may have, bounded by its answer's end. [3, num_rows]"""
    asked = [r.request.speculation for r in decoding]
    left = [r.remaining - 1 for r in decoding]
    most = [m if a is None else min(m, a.most) for m, a in zip(left, asked, strict=True)]
    return np.array([[r.row for r in decoding], [r.upper_len for r in decoding], most], np.int64)
