"""Phase `pairs`: targets with draft models, by shape. It runs only if named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.gpu.speculation import DraftStudy, measure_drafter

if TYPE_CHECKING:
    from tools.gpu.bench import GpuBench


def run(bench: GpuBench) -> None:
    """Measure each pair."""
    for pair in bench.sizes.pairs:
        path = (f"{pair.target.removeprefix('shape:')} + {pair.draft.rpartition('=')[2].rstrip(']')}",)
        measure_drafter(DraftStudy(bench, pair.target, pair.draft, pair.batches, pair.acceptance, path))
