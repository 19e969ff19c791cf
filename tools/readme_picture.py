r"""Draw the README's picture from a benchmark file: time per token, plain decoding beside `auto`.

    python -m tools.readme_picture docs/results/json/speculation-all480.json \
        docs/results/pictures/plain-beside-auto.svg

Needs only the standard library. The figures are the mean TPOT of the runs with one request in flight.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

WIDTH, BAR_PX, LABEL_PX, BAR_HEIGHT, GAP = 640, 430, 110, 34, 14
COLORS = {"off": "#8a8f98", "auto": "#2f81f7"}
LABELS = {"off": "plain", "auto": "auto"}


def ms_per_token(path: Path) -> dict[str, float]:
    """Return the mean time per output token of `off` and `auto`, in milliseconds."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    alone = [run for run in runs if run["concurrency"] == 1]
    return {draft: mean(r["tpot_ms"]["mean"] for r in alone if r["draft"] == draft) for draft in LABELS}


def bars(times_ms: dict[str, float]) -> str:
    """Return an SVG with one horizontal bar for each time, to the same scale."""
    height = len(times_ms) * (BAR_HEIGHT + GAP) + GAP
    longest = max(times_ms.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="16" fill="#8a8f98">'
    ]
    for index, (draft, time_ms) in enumerate(times_ms.items()):
        top = GAP + index * (BAR_HEIGHT + GAP)
        width = BAR_PX * time_ms / longest
        middle = top + BAR_HEIGHT / 2 + 6
        parts += [
            f'<text x="{LABEL_PX - 12}" y="{middle:.0f}" text-anchor="end">{LABELS[draft]}</text>',
            f'<rect x="{LABEL_PX}" y="{top}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="4" '
            f'fill="{COLORS[draft]}"/>',
            f'<text x="{LABEL_PX + width + 10:.0f}" y="{middle:.0f}">{time_ms:.1f} ms</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main(source: str, target: str) -> int:
    """Draw `target` from `source`."""
    Path(target).write_text(bars(ms_per_token(Path(source))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
