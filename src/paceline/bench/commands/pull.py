"""`paceline pull`: fetch a model before it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.bench.terminal import progress, say

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "name",
        nargs="?",
        default="default",
        metavar="default|ID|PATH",
        help="the default model, a Hugging Face id, or a folder or .gguf file to look at",
    )


def run(args: Namespace) -> int:
    """Fetch the model if it is not there, and print where it lies."""
    from paceline.model.pull import pull

    with progress(f"pulling {args.name}", unit="B") as update:
        path = pull(args.name, progress=update)
    say(str(path))
    return 0
