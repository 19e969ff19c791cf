"""`paceline generate`: answers to prompts, without a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.serve.commands.sampling import add_sampling_arguments, sampling_params
from paceline.serve.llm import LLM
from paceline.serve.terminal.banner import LoadingBar
from paceline.serve.terminal.capture import capture
from paceline.serve.terminal.generate import Item, generate, read_items

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `paceline generate`."""
    parser.add_argument("prompt", nargs="?", help="what to continue; standard input if it is missing or -")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="JSON lines with prompt, messages or turns, in place of a prompt",
    )
    parser.add_argument("--chat", action="store_true", help="send a prompt as a user's message")
    parser.add_argument("--json", action="store_true", help="write JSON lines with token ids and figures")
    parser.add_argument(
        "--capture",
        metavar="DIR",
        type=Path,
        help="append answers to DIR/answers.jsonl as token ids, to train on; goes on where it stopped",
    )
    parser.add_argument("--n", type=int, default=1, metavar="N", help="answers to each prompt")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: Namespace) -> int:
    """Answer everything asked."""
    params = sampling_params(args, n=args.n, ignore_eos=args.ignore_eos)
    items = _items(args)
    config = engine_config(args)
    with LoadingBar() as bar:
        llm = LLM.of(config, progress=bar)
    with llm:
        if args.capture is not None:
            return capture(llm, items, params, args.capture, chat=args.chat)
        return generate(llm, items, params, chat=args.chat, as_json=args.json, sink=sys.stdout)


def _items(args: Namespace) -> list[Item]:
    if args.prompts is not None:
        if args.prompt is not None:
            raise ConfigError("give a prompt or --prompts, not both")
        return read_items(args.prompts)
    text = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    if not text:
        raise ConfigError("there is no prompt; give one, or --prompts FILE")
    return [Item(1, text)]
