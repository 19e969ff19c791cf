"""`paceline completion`: the completion of a shell, made from the parsers of all commands."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "shell",
        choices=SHELLS,
        help="shell, such as bash: its output belongs into ~/.local/share/bash-completion/completions/paceline",
    )


def run(args: Namespace) -> int:
    """Write the completion to stdout."""
    import shtab

    sys.stdout.write(shtab.complete(whole_parser(), args.shell))
    return 0


def whole_parser() -> ArgumentParser:
    """Return one parser with all commands; those that cannot be imported here have no options."""
    from paceline.cli import COMMANDS, parser_of

    whole = argparse.ArgumentParser(prog="paceline", description="An inference engine for language models.")
    whole.add_argument("--version", action="store_true", help="tell version and build")
    inner: dict[str, Any] = {"": whole.add_subparsers()}
    for name in sorted(COMMANDS, key=lambda name: name.count(" ")):
        group, _, last = name.rpartition(" ")
        if group not in inner:
            about = COMMANDS[group][1] if group in COMMANDS else f"commands of {group}"
            inner[group] = inner[""].add_parser(group, help=about).add_subparsers()
        try:
            parents = [_options(parser_of(name))]
        except ConfigError:  # it needs PyTorch
            parents = []
        made = inner[group].add_parser(last, help=COMMANDS[name][1], parents=parents, add_help=not parents)
        if any(other.startswith(f"{name} ") for other in COMMANDS):
            inner[name] = made.add_subparsers()
    return whole


def _options(parser: ArgumentParser) -> ArgumentParser:
    """Return a parser whose help texts hold their defaults: completions fill in no %(default)s."""
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            action.help = action.help.replace("%(default)s", str(action.default))
    return parser
