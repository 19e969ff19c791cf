"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TextIO

from paceline.core.errors import ConfigError, RequestError
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.serve.llm import LLM
from paceline.serve.terminal.banner import LoadingBar, printable, show_choices
from paceline.serve.terminal.generate import add_sampling_arguments, sampling_values

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

    from paceline.core.nouns import Figures
    from paceline.core.params import SamplingParams

HELP = """/help   this text
/reset  forget the conversation
/quit   leave (so does the end of input)
Ctrl-C  stop the answer
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `paceline chat`."""
    parser.add_argument("--system", metavar="TEXT", help="system message that begins the conversation")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: Namespace) -> int:
    """Converse and return the exit status."""
    given = sampling_values(args)
    with LoadingBar() as bar:
        llm = LLM.of(engine_config(args), progress=bar)
    with llm:
        if llm.built.template is None:
            raise ConfigError("this model has no chat template; use `paceline generate`")
        if sys.stdin.isatty():
            show_choices(llm.built.choices, sys.stderr)
            sys.stderr.write(f"\n{HELP}\n")
        Chat(llm, replace(llm.default_params, **given), args.system).run()
    return 0


@dataclass(slots=True, eq=False)
class Chat:
    """Conversation between a stream of lines and a model."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    source: TextIO = field(default_factory=lambda: sys.stdin)
    sink: TextIO = field(default_factory=lambda: sys.stdout)
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> None:
        """Converse until the input ends or the user leaves."""
        self.reset()
        while (line := self._ask()) is not None:
            line = line.strip()
            if line.startswith("/"):
                if self._command(line) is False:
                    return
            elif line:
                self._answer(line)

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _ask(self) -> str | None:
        """Return the next line; None at the end of input or after Ctrl-C."""
        try:
            if self.source is sys.stdin and self.source.isatty():
                return input("> ")
            line = self.source.readline()
        except (EOFError, KeyboardInterrupt):
            self._write("\n")
            return None
        return line or None

    def _command(self, line: str) -> bool | None:
        command = _COMMANDS.get(line.split()[0])
        if command is None:
            self._write(f"unknown command {line.split()[0]}\n{HELP}")
            return None
        return command(self)

    def _answer(self, line: str) -> None:
        conversation = [*self.messages, {"role": "user", "content": line}]
        text, start_s = "", time.monotonic()
        figures, failed, first_s = None, None, start_s
        try:
            for delta in self.llm.stream(conversation, self.params):
                first_s = first_s if text else time.monotonic()
                text += delta.text
                figures, failed = delta.figures or figures, delta.outcome.error
                self._write(printable(delta.text, self.sink))
        except KeyboardInterrupt:
            self._write(" [stopped]")
        except RequestError as error:
            self._write(f"error: {error}\n/reset begins a new conversation\n")
            return
        if failed is not None:
            self._write(f"\nerror: {failed}\nthe conversation is as it was before this message\n")
            return
        self.messages = [*conversation, {"role": "assistant", "content": text}]
        self._write(f"\n{_summary(figures, time.monotonic() - first_s)}\n")

    def _write(self, text: str) -> None:
        self.sink.write(text)
        self.sink.flush()


def _quit(_: Chat) -> bool:
    return False


def _reset(chat: Chat) -> None:
    chat.reset()
    chat._write("forgotten\n")


def _help(chat: Chat) -> None:
    chat._write(HELP)


_COMMANDS: dict[str, Callable[[Chat], bool | None]] = {
    "/help": _help,
    "/reset": _reset,
    "/quit": _quit,
    "/exit": _quit,
}


def _summary(figures: Figures | None, wall_s: float) -> str:
    """Return a line with an answer's speed and how many drafts were accepted."""
    if figures is None:
        return "[stopped before the end]\n"
    rate = (figures.completion_tokens - 1) / wall_s if wall_s > 0 and figures.completion_tokens > 1 else 0.0
    drafts = f"{figures.accepted_tokens} of {figures.verified_tokens} drafts kept"
    length = f"{figures.acceptance_length:.2f} tokens per pass"
    return f"[{figures.completion_tokens} tokens, {rate:.1f} tokens/s, {length}, {drafts}, seed {figures.seed}]\n"
