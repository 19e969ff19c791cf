"""`paceline chat`: commands, a server at the other end, and a real terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx
import pytest

from paceline.core.errors import ConfigError, RequestError
from paceline.serve.terminal.chat import add_arguments
from paceline.serve.terminal.chat_commands import COMMANDS, HELP, obey
from paceline.serve.terminal.chat_session import Chat
from paceline.serve.terminal.generate import sampling_values
from paceline.serve.terminal.line_input import LineInput
from paceline.serve.terminal.speakers import Piece, ServerSpeaker, _piece
from tests.serve.conftest import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Server

SHORT = {"max_tokens": 12, "seed": 4, "temperature": 0.9}


def session(server: Server, text: str, system: str | None = None) -> tuple[Chat, str]:
    """Converse with a server over lines of text; return the conversation and what was shown."""
    sink = io.StringIO()
    chat = Chat(ServerSpeaker(server.url), dict(SHORT), system, LineInput(io.StringIO(text)), sink)
    chat.run(obey)
    return chat, sink.getvalue()


def test_a_server_answers_as_it_answers_everybody(server: Server, http: httpx.Client) -> None:
    chat, shown = session(server, "hello\n/draft off\n/retry\n/stats\n", "be kind")
    asked = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    body = {"messages": asked} | SHORT
    wanted = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert chat.messages == [*asked, {"role": "assistant", "content": wanted}]
    assert shown.count(", seed 4]") == shown.count("[12 tokens, reached the token limit, ") == 2
    assert "1.00 tokens per pass, 0 of 0 drafts kept, seed 4]" in shown  # the second, without drafts
    assert re.search(r"2 answers, 24 tokens, [\d.]+ tokens/s", shown)


def test_commands_change_the_conversation(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'changed by hand\\n' > \"$1\"\n")
    editor.chmod(0o755)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", str(editor))
    file = tmp_path / "talk.json"
    chat, shown = session(server, f"/system be brief\nfirst\n/edit\n/save {file}\n/reset\n/load {file}\n/retry\n")
    assert [m["content"] for m in chat.messages[:2]] == ["be brief", "changed by hand"]
    assert json.loads(file.read_text())["messages"] == chat.messages
    assert f"saved 3 messages to {file}" in shown
    assert "loaded 3 messages" in shown
    assert chat.system == "be brief"


def test_settings_are_checked(server: Server) -> None:
    text = "/set temperature 0.2\n/set top-p 0.5\n/set seed -1\n/set\n/set temperature 99\n/set heat 1\n"
    chat, shown = session(
        server, f"{text}/set top_k x\n/set temperature model\n/draft\n/draft ngram\n/draft {'x' * 99}\n"
    )
    assert chat.given == {"max_tokens": 12, "seed": None, "top_p": 0.5}
    assert "max_tokens 12, seed None, temperature 0.2, top_p 0.5" in shown
    assert "error: temperature must be between 0 and 10" in shown
    assert "nothing named 'heat' to set" in shown
    assert "top_k must be a number, not 'x'" in shown
    assert chat.draft == "ngram"
    assert "error: speculation.draft must be" in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/retry", "no message yet"),
        ("/edit", "no message yet"),
        ("/save", "say where"),
        ("/load", "say from where"),
        ("/load /nowhere/at.all", "No such file"),
        ("/save /nowhere/at.all", "No such file"),
        ("/save ~nosuchuser/at.all", "home directory"),
        ("/sav x", "did you mean '/save'"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(
    server: Server, line: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDITOR", "true")
    assert said in session(server, f"{line}\n")[1]


@pytest.mark.parametrize(
    ("command", "editor", "said"),
    [
        ("/set max_tokens 1000000\n/retry", "", "status 400"),
        ("/edit", "no-such-editor", "No such file"),
        ("/edit", "vi '", "No closing quotation"),
    ],
)
def test_a_message_that_gets_no_other_answer_keeps_the_one_it_has(
    server: Server, command: str, editor: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", editor)
    chat, shown = session(server, f"hello\n{command}\n")
    assert said in shown
    assert ("the conversation is as it was; if it is too long, /reset" in shown) == (said == "status 400")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"messages": 5}',
        '{"messages": [{"role": "x", "content": "y"}]}',
        '{"messages": [{"role": "user", "content": 5}]}',
    ],
)
def test_a_file_that_is_no_conversation_is_refused(server: Server, text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    chat, shown = session(server, f"/load {tmp_path / 'c.json'}\n")
    assert "conversation" in shown
    assert chat.messages == []


@pytest.mark.parametrize(("flags", "asked"), [([], None), (["--max-tokens", "256"], 256)])
def test_answers_are_as_long_as_the_flag_says(flags: list[str], asked: int | None) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    assert sampling_values(parser.parse_args(flags)).get("max_tokens") == asked


def test_messages_of_several_lines() -> None:
    lines = LineInput(io.StringIO('one\\\ntwo\n"""\na\n\nb\n"""\n"""x\ny"""\nlast\\\n'))
    assert [lines.message() for _ in range(4)] == ["one\ntwo", "a\n\nb", "x\ny", "last\\"]
    assert lines.message() is None


@pytest.mark.parametrize("typed", ['"""\nno wait\n', "no wait\\\n"])
def test_an_interrupt_forgets_a_half_written_message(typed: str) -> None:
    class Interrupted(io.StringIO):
        pressed = False

        def readline(self, size: int | None = -1) -> str:
            line = super().readline(size)
            if line == "" and not self.pressed:
                self.pressed = True
                raise KeyboardInterrupt
            return line

    source = Interrupted(typed)
    lines = LineInput(source)
    assert lines.message() == ""
    assert lines.message() is None


def test_help_names_every_command() -> None:
    assert all(name in HELP for name in COMMANDS if name != "/exit")


def test_no_server_and_no_server_of_ours() -> None:
    with pytest.raises(ConfigError, match=r"no server answers there.*paceline serve"):
        ServerSpeaker("http://127.0.0.1:9")
    for url in ("ftp://x", "http://", "http://x:y", "http://x/?q=1"):
        with pytest.raises(ConfigError, match="no address of a server"):
            ServerSpeaker(url)


def test_a_key_is_asked_for_and_sent(model: Path) -> None:
    with running(model, "--api-key", "k1") as server:
        with pytest.raises(ConfigError, match=r"status 401; set PACELINE_API_KEY, or give --api-key"):
            ServerSpeaker(server.url)
        speaker = ServerSpeaker(f"{server.url}/v1/", "k1")
        hello = [{"role": "user", "content": "hello"}]
        assert list(speaker.stream(hello, SHORT, "auto"))[-1].figures is not None
        with pytest.raises(RequestError, match=r"drafter .* \(status 400"):
            list(speaker.stream(hello, SHORT, "nobody"))
        with closing(speaker.stream(hello, {"max_tokens": 16000, "ignore_eos": True}, "auto")) as stream:
            next(stream)
        key = {"Authorization": "Bearer k1"}
        end_s = time.monotonic() + 120
        while server.metric("paceline_requests_open", **key) and time.monotonic() < end_s:
            time.sleep(0.05)
        assert server.metric("paceline_requests_open", **key) == 0


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"choices": 5},
        {"choices": [5]},
        {"choices": [{"delta": 5}]},
        {"choices": [{"delta": {"content": 5}}]},
        {"usage": 5},
        {"usage": {"completion_tokens": "x", "speculation": [1]}, "seed": "s"},
        {"error": 5},
    ],
)
def test_whatever_a_server_sends_is_taken(event: dict[str, object]) -> None:
    assert _piece(event).text == ""


def test_reasoning_is_shown_and_timed_but_kept_out_of_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    events = {  # second: event
        1.0: {"choices": [{"delta": {"role": "assistant"}}]},
        10.0: {"choices": [{"delta": {"reasoning_content": "so", "reasoning": "so"}}]},
        20.0: {"choices": [{"delta": {"reasoning": "..."}}]},
        29.0: {"choices": [{"delta": {"content": "Yes"}}]},
        30.0: {"choices": [{"delta": {"content": "!"}, "finish_reason": "stop"}]},
        30.1: {"choices": [], "usage": {"completion_tokens": 202}},
    }
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)

    class Thinker:
        def stream(self, *_: object) -> Iterator[Piece]:
            for clock.now_s, event in events.items():
                yield _piece(event)

    sink = io.StringIO()
    monkeypatch.setattr("paceline.serve.terminal.chat_session.time", clock)
    chat = Chat(Thinker(), {}, sink=sink)  # type: ignore[arg-type]
    chat.answer("well?")
    assert sink.getvalue().startswith("[reasoning]\nso...\n[answer]\nYes!\n[202 tokens, 10.0 tokens/s, ")
    assert chat.messages[-1] == {"role": "assistant", "content": "Yes!"}


# In a real terminal ------------------------------------------------------------------------------


class Terminal:
    """A process at a pseudo-terminal."""

    def __init__(self, *argv: str, **environ: str) -> None:
        self.master, slave = pty.openpty()
        env = os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"} | environ
        command = [sys.executable, "-m", "paceline.cli", *argv]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def until(self, pattern: str, since: int = 0, limit_s: float = 120.0) -> int:
        """Wait until a pattern shows, and return where it ends."""
        end_s = time.monotonic() + limit_s
        while not (found := re.compile(pattern).search(self.shown, since)):
            assert time.monotonic() < end_s, f"{pattern!r} does not show: {self.shown!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    assert re.search(pattern, self.shown[since:]), self.shown
        return found.end()

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Send what Ctrl-C sends, once the process waits.

        Python's prompt notices a signal between showing itself and waiting only at the next key.
        """
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "R":
            time.sleep(0.01)
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(server: Server, tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal("chat", "--url", server.url, "--max-tokens", "4000", XDG_STATE_HOME=str(tmp_path))
    yield found
    found.close()


def test_a_conversation_in_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    at = terminal.until("talking to .*; /help")
    at = terminal.until("> ", at)
    terminal.type("/set temperature 0\r")  # then the long answer below goes round and does not end
    at = terminal.until("> ", terminal.until("temperature 0", terminal.until("\n", at)))
    terminal.type("/set max_tokens 10\r")
    at = terminal.until("max_tokens 10", terminal.until("\n", at))
    at = terminal.until("> ", at)
    terminal.type('"""\rthe cat\rin the hat"""\r')
    at = terminal.until(r"tokens/s.*seed \d+\]", at)
    at = terminal.until("> ", at)
    terminal.type('"""\rno wait\r')
    at = terminal.until(r"no wait\s+\. ", at)
    terminal.interrupt()
    at = terminal.until(r"\n> ", at)
    terminal.type("/set max_tokens 15000\r")
    at = terminal.until("> ", terminal.until("max_tokens 15000", terminal.until("\n", at)))
    terminal.type("go on\r")
    at = terminal.until("\n", at)
    terminal.until(r"\S", at)
    terminal.type("QQQ\r")  # while the answer comes
    time.sleep(0.3)
    terminal.process.send_signal(signal.SIGINT)
    end = terminal.until(r"\[stopped", at)
    assert "QQQ" not in terminal.shown[at:end]
    at = terminal.until("> ", end)
    terminal.type("/stats\r")
    at = terminal.until("1 answers", at)
    terminal.type("/quit\r")
    assert terminal.process.wait(120) == 0
    history = (tmp_path / "paceline" / "chat_history").read_text()
    assert "go on" in history
    assert "QQQ" not in history
