"""A conversation in the terminal: what was said, what is asked next, what it cost."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from paceline.core.errors import EngineDied, RequestError
from paceline.core.params import AUTO
from paceline.serve.terminal.banner import printable
from paceline.serve.terminal.line_input import LineInput, quiet

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.figures import Figures
    from paceline.serve.terminal.speakers import Piece, Speaker


@dataclass(slots=True, eq=False)
class Totals:
    """Figures of the answers of a session, and the seconds that they took."""

    answers: list[Figures] = field(default_factory=list)
    seconds: float = 0.0

    def told(self) -> str:
        """Return the sums as a line."""
        if not self.answers:
            return "no answer yet\n"
        names = ("completion_tokens", "decode_passes", "verified_tokens", "accepted_tokens")
        tokens, passes, verified, accepted = (sum(getattr(f, name) for f in self.answers) for name in names)
        rate = tokens / self.seconds if self.seconds > 0 else 0.0
        per_pass = tokens / passes if passes else 1.0
        return (
            f"{len(self.answers)} answers, {tokens} tokens, {rate:.1f} tokens/s, {per_pass:.2f} tokens per pass, "
            f"{accepted} of {verified} drafts kept\n"
        )


@dataclass(slots=True, eq=False)
class Chat:
    """Conversation between a user and a speaker."""

    speaker: Speaker
    given: dict[str, Any]  # sampling that is not left to the model
    system: str | None = None
    lines: LineInput = field(default_factory=lambda: LineInput(sys.stdin))
    sink: TextIO = field(default_factory=lambda: sys.stdout)
    messages: list[dict[str, str]] = field(default_factory=list)
    draft: str = AUTO
    totals: Totals = field(default_factory=Totals)

    def run(self, obey: Callable[[Chat, str], bool | None]) -> None:
        """Converse until the input ends. obey: does a command; False to leave."""
        self.reset()
        while (line := self.lines.message()) is not None:
            line = line.strip()
            if line.startswith("/"):
                if obey(self, line) is False:
                    return
            elif line:
                self.answer(line)
        self.write("\n")

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, line: str, earlier: list[dict[str, str]] | None = None) -> None:
        """Ask for the answer to a message, and keep both unless it failed.

        earlier: messages before it, in place of all.
        """
        conversation = [*(self.messages if earlier is None else earlier), {"role": "user", "content": line}]
        text, thought, figures, failed, cut = "", "", None, None, False
        start_s = first_s = time.monotonic()
        try:
            with quiet(sys.stdin), closing(self.speaker.stream(conversation, self.given, self.draft)) as stream:
                for piece in stream:
                    shown = _shown(piece, text, thought)
                    first_s = first_s if text or thought or not shown else time.monotonic()
                    text, thought = text + piece.text, thought + piece.reasoning
                    figures, failed, cut = piece.figures or figures, piece.error or failed, piece.cut or cut
                    self.write(printable(shown, self.sink))
        except KeyboardInterrupt:
            self.write(" [stopped]")
        except RequestError as error:
            self.write(f"error: {error}\nthe conversation is as it was; ")
            self.write("if it is too long, /reset begins a new one\n")
            return
        except EngineDied as error:
            failed = str(error)
        if failed is not None:
            self.write(f"\nerror: {failed}\nthe conversation is as it was\n")
            return
        self.messages = [*conversation, {"role": "assistant", "content": text}]
        self.write(f"\n{_summary(figures, time.monotonic() - first_s, cut=cut)}\n")
        if figures is not None:
            self.totals.answers.append(figures)
            self.totals.seconds += time.monotonic() - start_s

    def write(self, text: str) -> None:
        """Show text at once."""
        self.sink.write(text)
        self.sink.flush()


def _shown(piece: Piece, text: str, thought: str) -> str:
    """Return what a piece shows. text, thought: of the pieces before it."""
    begun = "[reasoning]\n" if piece.reasoning and not thought else ""
    ended = "\n[answer]\n" if piece.text and not text and (thought or piece.reasoning) else ""
    return f"{begun}{piece.reasoning}{ended}{piece.text}"


def _summary(figures: Figures | None, wall_s: float, *, cut: bool) -> str:
    """Return a line with an answer's speed and how many drafts were accepted."""
    if figures is None:
        return "[stopped before the end]\n"
    num_tokens = figures.completion_tokens
    rate = (num_tokens - 1) / wall_s if wall_s > 0 and num_tokens > 1 else 0.0
    drafts = f"{figures.accepted_tokens} of {figures.verified_tokens} drafts kept"
    length = f"{figures.acceptance_length:.2f} tokens per pass"
    tokens = f"{num_tokens} tokens{', reached the token limit' if cut else ''}"
    return f"[{tokens}, {rate:.1f} tokens/s, {length}, {drafts}, seed {figures.seed}]\n"
