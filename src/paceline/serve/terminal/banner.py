"""Progress while an engine loads, and the banner once it is ready.

Rich output on a terminal, plain text elsewhere, where `rich` is not even imported.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from paceline import __version__
from paceline.core.system import commit
from paceline.serve.terminal.display import is_screen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.progress import Progress, TaskID

    from paceline.engine.assembly.config import Choice

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LoadingBar:
    """Progress of pulling, loading and measuring; call it with (what, done, total)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stderr if stream is None else stream
        self._stream = stream
        self._seen: dict[str, TaskID | None] = {}
        self._bar = _bar(stream) if is_screen(stream) else None

    def __enter__(self) -> LoadingBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar. May be called twice."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` is done."""
        if self._bar is None:
            self._write_line(what)
            return
        if what not in self._seen:
            self._seen[what] = self._bar.add_task(what, total=total)
        task = self._seen[what]
        assert task is not None
        self._bar.update(task, completed=done, total=total)

    def _write_line(self, what: str) -> None:
        if what not in self._seen:
            self._seen[what] = None
            self._stream.write(f"{what} ...\n")
            self._stream.flush()


def _bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(file=stream)
    what = TextColumn("{task.description}", markup=False)  # it names files, whose paths may hold [brackets]
    columns = (what, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def printable(text: str, stream: TextIO) -> str:
    """Return a model's text without the control characters that could steer a terminal."""
    return text if not stream.isatty() else _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def show_choices(choices: Iterable[Choice], stream: TextIO) -> None:
    """Show what was chosen at start-up, and why."""
    if not stream.isatty():
        for choice in choices:
            stream.write(f"{choice.what:<9}{choice.value}  ({choice.why})\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for choice in choices:
        table.add_row(Text(choice.what, "bold cyan"), Text(choice.value), Text(choice.why, "dim"))
    Console(file=stream).print(table)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts of a server for the banner."""

    url: str
    chats: bool
    needs_key: bool
    ready_s: float  # from the start of the command
    page: bool = True

    def access(self) -> str:
        """Return who may come in, and how long the start took."""
        return f"ready in {self.ready_s:.1f} s, {'a key is asked for' if self.needs_key else 'no key asked for'}"

    def places(self) -> str:
        """Return the URLs worth knowing."""
        return f"metrics {self.url}/metrics, API {self.url}/openapi.json"


def show_url(facts: ServerFacts, stream: TextIO) -> None:
    """Show a server's URLs and a shell line that can be pasted."""
    line = curl_line(facts.url, facts.chats, facts.needs_key)
    ways = "Open it in a browser, or try:" if facts.page else "Try it:"
    title = f"Paceline {_build()} serves at "
    if stream.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(file=stream, highlight=False, soft_wrap=True)
        console.print(Text(f"\n{title}").append(facts.url, "bold green").append(f"  {facts.access()}", "dim"))
        console.print(Text(facts.places(), "dim"))
        console.print(Text(f"{ways}\n"))
        stream.write(line + "\n\n")  # not wrapped, so that it can be pasted
    else:
        stream.write(f"\n{title}{facts.url}  ({facts.access()})\n{facts.places()}\n{ways}\n\n{line}\n\n")
    stream.flush()


def curl_line(url: str, chats: bool, needs_key: bool) -> str:
    """Return a shell line that sends the server a request."""
    key = '-H "Authorization: Bearer $PACELINE_API_KEY" ' if needs_key else ""
    route, body = (
        ("chat/completions", '{"messages":[{"role":"user","content":"What is a paceline?"}],"max_tokens":100}')
        if chats
        else ("completions", '{"prompt":"A paceline is","max_tokens":50}')
    )
    return f"curl {url}/v1/{route} {key}-H 'Content-Type: application/json' -d '{body}'"


def version_line() -> str:
    """Return what `paceline --version` says."""
    from paceline.backend.registry import BACKENDS

    try:
        from paceline import kernels

        isa = kernels.isa()
    except (ImportError, OSError) as error:
        isa = f"kernels cannot be loaded: {error}"
    return f"paceline {_build()}, {isa}, backends {', '.join(BACKENDS)}"


def _build() -> str:
    made = commit()
    return f"{__version__} ({made})" if made else __version__
