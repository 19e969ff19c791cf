"""`paceline rm`: remove a model that is here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, suggest
from paceline.model.files.kept_models import kept_models
from paceline.serve.terminal.display import say

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="a name that `paceline list` tells")
    parser.add_argument("--yes", action="store_true", help="do not ask")


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
    return input(f"remove {what}? [y/N] ").strip().lower() in ("y", "yes")
