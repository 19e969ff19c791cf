"""`paceline fleet drain` and `paceline fleet move`: move a fleet's work between replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.serve.terminal.display import say
from paceline.serve.terminal.show_fleet import add_url_arguments, ask

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


class Drain:
    """`paceline fleet drain REPLICA`: take a replica out of service and move its answers."""

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument("replica", metavar="REPLICA", help="name in the table of `paceline fleet`")
        parser.add_argument("--undo", action="store_true", help="take it back into service")
        add_url_arguments(parser)

    @staticmethod
    def run(args: Namespace) -> int:
        """Drain a replica."""
        found = ask(args, "POST", "/v1/fleet/drain", {"replica": args.replica, "undo": args.undo})
        back = f"replica {args.replica} takes requests again"
        say(back if args.undo else f"replica {args.replica} drains; answers moved: {found['moved']}")
        return 0


class Move:
    """`paceline fleet move REQUEST REPLICA`: let another replica go on with an answer."""

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument("request", metavar="REQUEST", help="id in the table of `paceline fleet`")
        parser.add_argument("replica", metavar="REPLICA", help="name of the replica that goes on with it")
        add_url_arguments(parser)

    @staticmethod
    def run(args: Namespace) -> int:
        """Move an answer."""
        ask(args, "POST", "/v1/fleet/move", {"request": args.request, "replica": args.replica})
        say(f"replica {args.replica} goes on with request {args.request}")
        return 0
