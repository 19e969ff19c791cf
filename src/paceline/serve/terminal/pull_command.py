"""`paceline pull`: fetch a model before it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.serve.terminal.display import progress, say

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "name",
        nargs="?",
        default="default",
        metavar="default|ID|PATH",
        help="the default model, a Hugging Face id, or a folder or .gguf file to check",
    )


def run(args: Namespace) -> int:
    """Fetch the model unless present, check that it can be used, print its path."""
    from paceline.model.files.pull import pull
    from paceline.model.weights import load_model

    path = Path(args.name)
    if not path.exists():
        with progress(f"pulling {args.name}", unit="B") as update:
            path = pull(args.name, progress=update)
    load_model(path)
    say(str(path))
    return 0
