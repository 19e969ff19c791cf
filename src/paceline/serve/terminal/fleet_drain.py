"""`paceline fleet drain REPLICA`: take a replica out of service and move its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.serve.terminal.display import say
from paceline.serve.terminal.show_fleet import add_url_arguments, ask

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("replica", metavar="REPLICA", help="name in the table of `paceline fleet`")
    parser.add_argument("--undo", action="store_true", help="take it back into service")
    add_url_arguments(parser)


def run(args: Namespace) -> int:
    """Drain a replica."""
    found = ask(args, "POST", "/v1/fleet/drain", {"replica": args.replica, "undo": args.undo})
    back = f"replica {args.replica} takes requests again"
    say(back if args.undo else f"replica {args.replica} drains; answers moved: {found['moved']}")
    return 0
