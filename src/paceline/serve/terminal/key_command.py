"""`paceline key new NAME`: a key, shown once, and the line that stores it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.serve.api.keys import ROLES, new_key

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `paceline key new`."""
    parser.add_argument("name", metavar="NAME", help="name of the key in logs and metrics")
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="all",
        help="metrics: may only read /metrics; admin: may operate a fleet, too",
    )


def run(args: Namespace) -> int:
    """Write the line to standard output, the key to standard error. Raises `ConfigError`."""
    key, stored = new_key(args.name, args.role)
    sys.stderr.write(f"the key, shown only now: {key}\nadd this line to the file of --api-key-file:\n")
    sys.stderr.flush()
    sys.stdout.write(f"{stored.line}\n")
    return 0
