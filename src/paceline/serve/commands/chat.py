"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.serve.commands.sampling import add_sampling_arguments, sampling_params
from paceline.serve.llm import LLM
from paceline.serve.terminal.banner import LoadingBar, show_choices
from paceline.serve.terminal.chat import HELP, Chat

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `paceline chat`."""
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: Namespace) -> int:
    """Converse."""
    params = sampling_params(args)
    with LoadingBar() as bar:
        llm = LLM.of(engine_config(args), progress=bar)
    with llm:
        if llm.built.template is None:
            raise ConfigError("this model has no chat template; use `paceline generate`")
        if sys.stdin.isatty():
            show_choices(llm.built.choices, sys.stderr)
            sys.stderr.write(f"\n{HELP}\n")
        Chat(llm, params, args.system).run()
    return 0
