"""Buckets: total tokens of passes for which graphs are captured."""

from __future__ import annotations

# A pass is padded to the next of these sizes; longer passes are not. The controller's staircase rises at each.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024)


def bucket(count: int) -> int:
    """Return the size to which a count is padded."""
    return next((size for size in BUCKETS if size >= count), count)
