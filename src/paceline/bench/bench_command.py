"""`paceline bench`: measure decoding with and without speculation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.prompt_file import BUILTIN, PROMPTS_HELP, PROMPTS_METAVAR, read_prompts
from paceline.core.errors import ConfigError
from paceline.core.flags import numbers_of
from paceline.core.params import SamplingParams
from paceline.engine.assembly.cli_options import add_target_arguments, engine_config
from paceline.engine.assembly.config import AUTO, DEFAULT_DRAFT, MAX_ROWS, OVERLAPS
from paceline.serve.terminal.display import progress, say
from paceline.serve.terminal.output_files import check_file, check_picture

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from paceline.bench.measure import Run
    from paceline.bench.prompt_file import Prompt
    from paceline.bench.session import Session

MAX_LIMIT = 1 << 24  # prompts
MAX_RATE_PER_S = 1_000_000  # requests


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    what = parser.add_argument_group("what to measure")
    what.add_argument("--prompts", default=BUILTIN, metavar=PROMPTS_METAVAR, help=PROMPTS_HELP)
    what.add_argument("--limit", type=int, metavar="N", help="only N prompts, evenly spaced over the file")
    what.add_argument("--max-tokens", type=int, default=128, metavar="M", help="tokens of an answer at most")
    what.add_argument("--concurrency", metavar="C[,C...]", help="requests in flight (default: 1)")
    what.add_argument(
        "--draft",
        action="append",
        metavar="SPEC",
        help=f"off, or NAME[:key=value,...]; repeatable (default: off and {DEFAULT_DRAFT})",
    )
    what.add_argument("--overlap", choices=OVERLAPS, default=AUTO, help="draft one half while the other is scored")
    what.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token")
    what.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest up to this share")
    what.add_argument("--seed", type=int, default=0, metavar="S", help="question i is asked with seed S + i")
    what.add_argument("--ignore-eos", action="store_true", help="write M tokens whatever the model says")
    how = parser.add_argument_group("how")
    how.add_argument("--repeat", type=int, default=1, metavar="R", help="runs of each draft, interleaved")
    how.add_argument("--warmup", type=int, default=1, metavar="W", help="requests that do not count, per draft")
    how.add_argument(
        "--warm",
        action="store_true",
        help="keep caches and history from run to run; of a server by sending no cache_salt, which not all take",
    )
    how.add_argument("--url", metavar="U", help="drive the server at U rather than an engine in this process")
    how.add_argument("--request-rate", type=float, metavar="R", help="with --url: Poisson arrivals per second")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="write all figures")
    out.add_argument("--save-tokens", metavar="FILE", help="write the token ids of every answer")
    out.add_argument("--plot", metavar="FILE.json", help="measure nothing, draw what --json wrote")
    out.add_argument("--out", default="bench.png", metavar="FILE.png", help="where --plot draws")
    add_target_arguments(parser)


def run(args: Namespace) -> int:
    """Measure, print the tables, write the files."""
    from paceline.bench import report

    if args.plot is not None:
        from paceline.bench.pictures import draw_bench

        check_picture("--out", args.out)
        draw_bench(Path(args.plot), Path(args.out))
        say(args.out)
        return 0
    _check(args)
    session, prompts = _session(args), read_prompts(args.prompts, args.limit)
    head, runs = _there(args, session, prompts) if args.url else _here(args, session, prompts)
    from paceline.bench.measure import record

    records = [record(r) for r in runs]
    report.print_tables(records)
    if args.json:
        report.write_json(Path(args.json), report.document(head, records))
    if args.save_tokens:
        report.write_tokens(Path(args.save_tokens), runs)
    return 0


def _check(args: Namespace) -> None:
    """Raise `ConfigError` for options that would fail only after measuring, or that mean nothing."""
    check_limit(args.limit)
    _check_server(args)
    check_file("--json", args.json)
    check_file("--save-tokens", args.save_tokens)


def check_limit(limit: int | None) -> None:
    """Raise `ConfigError` for a number of prompts out of bounds."""
    if limit is not None and not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"--limit must be between 1 and {MAX_LIMIT}, not {limit}")


def _check_server(args: Namespace) -> None:
    rate = args.request_rate
    if rate is not None and not (args.url and math.isfinite(rate) and 0.0 < rate <= MAX_RATE_PER_S):
        raise ConfigError(f"--request-rate needs --url, and a number above 0 and at most {MAX_RATE_PER_S}")
    if rate is not None and args.concurrency is not None:
        raise ConfigError("--request-rate: requests come when they come; leave out --concurrency")
    if args.url and len(args.draft or ()) > 1:
        raise ConfigError("--url: the server has one drafter; --draft can only be the name it gets in the table")
    if args.url and args.save_tokens:
        raise ConfigError("--save-tokens: a server does not send token ids; leave out --url")


def _session(args: Namespace) -> Session:
    from paceline.bench.session import Session

    usual = ["server"] if args.url else ["off", DEFAULT_DRAFT]
    return Session(
        drafts=tuple(dict.fromkeys(args.draft or usual)),
        concurrencies=numbers_of("--concurrency", args.concurrency or "1", 1, MAX_ROWS),
        params=SamplingParams(**_params(args)),
        seed=args.seed,
        repeat=args.repeat,
        warmup=args.warmup,
        warm=args.warm,
    )


def _params(args: Namespace) -> dict[str, Any]:
    """Return the sampling that is asked for, by the names that servers know, too."""
    return {name: getattr(args, name) for name in ("temperature", "top_p", "max_tokens", "ignore_eos")}


def _here(args: Namespace, session: Session, prompts: list[Prompt]) -> tuple[dict[str, Any], list[Run]]:
    from paceline.bench.report import file_head
    from paceline.bench.session import model_and_backend, run_here
    from paceline.draft.registry import parse_drafters
    from paceline.engine.assembly.build import load

    args.draft = session.drafts[0]
    config = engine_config(args)
    for draft in session.drafts:
        parse_drafters(draft)  # fail on a bad spec before the weights are loaded
    with progress(f"loading {args.model}") as update:
        loaded = load(config, lambda _, done, total: update(done, total))
    total = session.num_runs * len(prompts)
    with progress("measuring") as update:
        runs = list(run_here(config, loaded, session, prompts, lambda done: update(done, total)))
    return file_head(model_and_backend(config, loaded)), runs


def _there(args: Namespace, session: Session, prompts: list[Prompt]) -> tuple[dict[str, Any], list[Run]]:
    from paceline.bench.load import driven_server
    from paceline.bench.report import file_head
    from paceline.bench.session import run_there

    target = driven_server(args.url, _params(args))
    levels = 1 if args.request_rate is not None else len(session.concurrencies)
    total = session.repeat * levels * len(prompts)
    with progress("measuring") as update:
        runs = list(run_there(target, session, args.request_rate, prompts, lambda done: update(done, total)))
    subject = {"model": {"name": target.body["model"]}, "backend": {"name": "server", "url": args.url}}
    return file_head(subject), runs
