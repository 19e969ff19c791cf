"""Options of `paceline serve` for operators: logs, browsers, TLS, keys, traces."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core import logs
from paceline.core.errors import ConfigError
from paceline.core.flags import add_flags, of_flags

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import NoReturn

OWN_NAMES, _ = METRICS_NAMES = ("paceline", "vllm")  # values of --metrics-names; metrics always have our own names
MAX_NAMES = 64  # origins, hosts
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]{0,30}://[A-Za-z0-9.\[\]:_-]{1,255}")
_HOST = re.compile(r"[a-z0-9_.-]{1,253}|\[?[0-9a-f:.]{2,45}\]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationOptions:
    """Options of operators. Checked when made; raises `ConfigError`."""

    access_log: bool = True  # a line for each request, and one on the engine's doings now and then
    cors_origins: tuple[str, ...] = ()  # of pages in browsers that may send requests; * for all
    allowed_hosts: tuple[str, ...] = ()  # names beside this machine's own that requests may address
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_key_file: Path | None = None
    otlp_endpoint: str | None = None
    rl: bool = False  # routes of trainers: roll-outs, and weights that are replaced
    metrics_names: str = OWN_NAMES  # names of metrics: our own, or also vLLM's

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"--cors-origin must be * or like https://host:port, not {origin[:64]!r}")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"--allowed-host must be a name without port, not {host[:64]!r}")
        if max(len(self.cors_origins), len(self.allowed_hosts)) > MAX_NAMES:
            raise ConfigError(f"at most {MAX_NAMES} of --cors-origin and of --allowed-host may be given")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both or neither")
        if self.tls_cert is not None and self.tls_key is not None:
            _check_tls(self.tls_cert, self.tls_key)


def _check_tls(cert: Path, key: Path) -> None:
    """Raise `ConfigError` for files that no TLS connection could use."""

    def encrypted() -> NoReturn:
        raise ConfigError(f"--tls-key {key} is encrypted; give a key without a passphrase")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=encrypted)
    except OSError as error:  # ssl.SSLError is one
        why = getattr(error, "reason", None) or error.strerror
        raise ConfigError(f"--tls-cert {cert} and --tls-key {key} cannot be used: {why}") from None


def add_operation_arguments(parser: ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("operation")
    about = "log a line for each request, and one on the engine's doings every 10 s of work"
    add_flags(group, OperationOptions(), {"access_log": about})
    group.add_argument("--log-format", choices=logs.FORMATS, default="text", help="lines of text, or JSON objects")
    group.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="let pages of this origin send requests from browsers, * for any; may be repeated",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="answer to this name too, such as host.docker.internal; may be repeated",
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="speak TLS with this certificate (PEM)")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of the certificate (PEM)")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="ask for one of the keys in this file, see `paceline key new`; read again on SIGHUP",
    )
    group.add_argument(
        "--otlp-endpoint", metavar="URL", help="send a trace of each request to this OpenTelemetry collector"
    )
    group.add_argument(
        "--metrics-names",
        choices=METRICS_NAMES,
        default=OWN_NAMES,
        help="tell metrics by vLLM's names, too, for routers that know those",
    )
    group.add_argument(
        "--rl",
        action="store_true",
        help="serve trainers: /generate for roll-outs, and routes that replace weights",
    )


def operation_of(args: Namespace) -> OperationOptions:
    """Return what parsed flags ask for. Raises `ConfigError`."""
    origins, hosts = args.cors_origin or (), args.allowed_host or ()
    names = tuple(host.lower() for host in hosts)
    return of_flags(OperationOptions, args, cors_origins=tuple(origins), allowed_hosts=names)


def configure_logs(args: Namespace) -> None:
    """Set up the logs of this process and of those that it starts."""
    os.environ[logs.FORMAT] = args.log_format
    logs.configure()
