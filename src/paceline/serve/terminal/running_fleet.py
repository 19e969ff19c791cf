"""`paceline fleet`, `drain` and `move`: the replicas of a running server, and their work."""

from __future__ import annotations

import http.client
import json
import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, RequestError
from paceline.serve.terminal.display import say, table
from paceline.serve.terminal.running_server import MAX_LINE_BYTES, RunningServer

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

ASK_S = 10.0
MOST_REQUESTS = 20  # in the table
_COLUMNS = {
    "replica": "replica",
    "state": "state",
    "cores": "cores",
    "rows": "rows",
    "tpot_ms": "TPOT ms",
    "predicted_tpot_ms": "predicted",
    "k_mean": "K",
    "hit_rate": "hits",
    "pages_held": "pages held",
    "resumes": "resumes",
    "restarts": "restarts",
    "promise": "promise key",
}
_KEY_CHARS = 12  # of a promise key, in the table


def add_url_arguments(parser: ArgumentParser) -> None:
    """Add the flags of a running server."""
    parser.add_argument(
        "--url", metavar="URL", default="http://127.0.0.1:8000", help="address of `paceline serve --replicas N`"
    )
    parser.add_argument("--api-key", metavar="KEY", help="of the server, or PACELINE_API_KEY")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `paceline fleet`."""
    add_url_arguments(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object")


def ask(
    args: Namespace, method: str, route: str, body: object = None, *, fields: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the response, which must have these fields. Raises `ConfigError`, `RequestError`, `EngineDied`."""
    server = RunningServer(args.url, args.api_key or os.environ.get("PACELINE_API_KEY") or None)
    with closing(server.connection(ASK_S)) as connection:
        response = server.asked(connection, method, route, body)
        if response.status == 404 and body is None:
            raise ConfigError(f"{args.url} is no fleet; start it with `paceline serve --replicas 2`")
        if response.status != 200:
            raise RequestError(server.refusal(response))
        try:
            found = json.loads(response.read(MAX_LINE_BYTES))
        except (OSError, ValueError, RecursionError, http.client.HTTPException):
            found = None
    if not isinstance(found, dict) or not found.keys() >= set(fields):
        raise ConfigError(f"{args.url} answers, but not as a fleet does")
    return found


def run(args: Namespace) -> int:
    """Write the tables of replicas and open requests."""
    found = ask(args, "GET", "/v1/fleet", fields=("replicas", "requests"))
    if args.json:
        say(json.dumps(found))
        return 0
    rows = [[_shown(field, replica.get(field)) for field in _COLUMNS] for replica in found["replicas"]]
    table("", list(_COLUMNS.values()), rows, num_left=3)
    requests = found["requests"]
    if requests:
        lines = [[str(request[name]) for name in ("request", "replica", "tokens", "legs")] for request in requests]
        table("", ["request", "replica", "tokens", "legs"], lines[:MOST_REQUESTS], num_left=2)
    if len(requests) > MOST_REQUESTS:
        say(f"and {len(requests) - MOST_REQUESTS} more")
    return 0


def _shown(field: str, value: object) -> str:
    if value is None or value == "":
        return "-"
    return str(value)[: _KEY_CHARS if field == "promise" else None]


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
        body = {"replica": args.replica, "undo": args.undo}
        found = ask(args, "POST", "/v1/fleet/drain", body, fields=("moved",))
        back = f"replica {args.replica} takes requests again"
        say(back if args.undo else f"replica {args.replica} drains; answers to move: {found['moved']}")
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
