"""`paceline chat`: a conversation in the terminal, with speed and acceptance after every answer."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.serve.llm import LLM
from paceline.serve.terminal.banner import LoadingBar, show_choices
from paceline.serve.terminal.chat_commands import COMMANDS, obey
from paceline.serve.terminal.chat_session import Chat
from paceline.serve.terminal.generate import add_sampling_arguments, sampling_values
from paceline.serve.terminal.line_input import LineInput
from paceline.serve.terminal.speakers import LocalSpeaker, ServerSpeaker

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from paceline.serve.terminal.speakers import Speaker


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `paceline chat`."""
    parser.add_argument("--url", metavar="URL", help="talk to the server there rather than load a model")
    parser.add_argument("--api-key", metavar="KEY", help="of that server")
    parser.add_argument("--system", metavar="TEXT", help="system message that begins the conversation")
    parser.add_argument("--no-history", action="store_true", help="keep no history of typed lines")
    add_sampling_arguments(parser)
    parser.set_defaults(max_tokens=None)  # answers may fill the context
    add_engine_arguments(parser)


def run(args: Namespace) -> int:
    """Converse and return the exit status."""
    given = sampling_values(args)
    with ExitStack() as stack:
        speaker = _server(args) if args.url else _local(args, stack)
        if sys.stdin.isatty():
            sys.stderr.write(f"\ntalking to {speaker.name}; /help lists the commands\n\n")
        lines = LineInput(sys.stdin, list(COMMANDS), keep=not args.no_history)
        stack.callback(lines.close)
        Chat(speaker, given, args.system, lines).run(obey)
    return 0


def _local(args: Namespace, stack: ExitStack) -> Speaker:
    with LoadingBar() as bar:
        llm = stack.enter_context(LLM.of(engine_config(args), progress=bar))
    if llm.built.template is None:
        raise ConfigError("this model has no chat template; use `paceline generate`")
    if sys.stdin.isatty():
        show_choices(llm.built.choices, sys.stderr)
    return LocalSpeaker(llm)


def _server(args: Namespace) -> Speaker:
    usual = engine_config(args)
    if args.draft or usual.model != "default":
        raise ConfigError("--url: the server has its own; leave out --model and --draft, also in the environment")
    return ServerSpeaker(args.url, args.api_key)
