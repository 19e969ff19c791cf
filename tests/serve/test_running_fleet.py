"""`paceline fleet` against servers that are fleets, and others that are none."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from paceline.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME, CORES, KEY = "paceline-1f2e3d4c:ab12cd34", "0-3+8-11+16-19", "0123456789abcdef"


@pytest.fixture
def answering() -> Iterator[Callable[[str], str]]:
    """Starts a server that answers everything with 200 and a text, and returns its address."""
    servers = []

    def start(text: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_table_has_whole_names_and_says_what_it_leaves_out(
    answering: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    replica = {"replica": NAME, "state": "up", "cores": CORES, "promise": KEY}
    requests = [{"request": f"r{i}", "replica": NAME, "tokens": 1, "legs": 1} for i in range(24)]
    url = answering(json.dumps({"replicas": [replica], "requests": requests}))
    assert main(["fleet", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in (NAME, CORES, KEY[:12], "r19", "\nand 4 more\n"))
    assert KEY not in shown
    assert "r20" not in shown


@pytest.mark.parametrize("text", ["<html>", "{}", "5", pytest.param("[" * 100_000, id="deep"), '{"replicas": []}'])
@pytest.mark.parametrize("words", [["fleet"], ["fleet", "drain", "0"]])
def test_a_server_that_is_no_fleet_is_told_in_one_line(
    words: list[str], text: str, answering: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = answering(text)
    assert main([*words, "--url", url]) == 2
    assert capsys.readouterr().err == f"error: {url} answers, but not as a fleet does\n"
