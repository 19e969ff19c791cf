"""`paceline serve`: a model over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.serve.server import HttpConfig, HttpServer
from paceline.serve.terminal.banner import LoadingBar, show_choices, show_url

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping

    from paceline.engine.assembly.config import EngineConfig
    from paceline.serve.worker.messages import Progress, Ready

DEFAULTS = HttpConfig()
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `paceline serve`."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default=DEFAULTS.host, help="address to listen on")
    group.add_argument("--port", type=int, default=DEFAULTS.port, help="port to listen on; 0 takes a free one")
    group.add_argument("--api-key", metavar="KEY", help="ask for this key on every route but /health")
    group.add_argument(
        "--insecure", action="store_true", help="let other machines in without a key, and answer to any name"
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        metavar="S",
        default=DEFAULTS.drain_s,
        help="how long open requests may go on after SIGTERM",
    )
    group.add_argument(
        "--max-open", type=int, metavar="N", default=DEFAULTS.max_open, help="answers that may be open at once"
    )
    group.add_argument("--access-log", action="store_true", help="log every request")
    add_engine_arguments(parser)


def http_config(args: Namespace) -> HttpConfig:
    """Return the HTTP side that parsed flags ask for. Raises `ConfigError`."""
    return HttpConfig(
        host=args.host,
        port=args.port,
        api_key=args.api_key or os.environ.get("PACELINE_API_KEY") or None,
        insecure=args.insecure,
        drain_s=args.drain_seconds,
        max_open=args.max_open,
        access_log=args.access_log,
    )


def log_level(environ: Mapping[str, str]) -> str:
    """Return the level of PACELINE_LOG_LEVEL. Raises `ConfigError`; the engine's processes read it, too."""
    level = environ.get("PACELINE_LOG_LEVEL", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():  # which has some synonyms as well
        raise ConfigError(f"PACELINE_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
    return level


def run(args: Namespace) -> int:
    """Serve until told to stop."""
    logging.basicConfig(level=log_level(os.environ), format="%(message)s")
    if args.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return asyncio.run(_serve(http_config(args), engine_config(args)))


async def _serve(config: HttpConfig, engine: EngineConfig) -> int:
    with LoadingBar() as bar:

        def on_progress(progress: Progress) -> None:
            bar(progress.what, progress.done, progress.total)

        def on_ready(url: str, ready: Ready) -> None:
            bar.close()
            show_choices(ready.choices, sys.stdout)
            show_url(url, ready.template is not None, sys.stdout, config.api_key is not None)

        await HttpServer(config, engine, on_progress).run(on_ready)
    return 0
