"""Shared start and end of the tools: the `--prompts` option, and errors as one line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.bench.prompt_file import BUILTIN, PROMPTS_HELP, PROMPTS_METAVAR
from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable


def add_prompts(parser: ArgumentParser) -> None:
    """Add `--prompts`, by default the built-in ones."""
    parser.add_argument("--prompts", default=BUILTIN, metavar=PROMPTS_METAVAR, help=PROMPTS_HELP)


def exit_status(main: Callable[[], int]) -> int:
    """Run a tool, with user errors as one line, and return its exit status."""
    try:
        return main()
    except PacelineError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
