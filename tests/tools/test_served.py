"""A server that a tool starts: its phases, its end, and what is said if it does not start."""

from __future__ import annotations

import signal
import sys

import pytest
from tools.served import served, start_server

from paceline.core.errors import ConfigError
from tools import served as module

SERVES = "print('loading ...'); print('Paceline serves at http://127.0.0.1:1  (ready)', flush=True); "
STAYS = "import time; time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def runs(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", code))


def test_phases_and_url_are_read_and_the_server_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, SERVES + STAYS)
    told: list[str] = []
    server = start_server([], on_phase=lambda what, _: told.append(what))
    assert server.wait() == "http://127.0.0.1:1"
    assert told == [what for what, _ in server.phases] == ["loading"]
    assert 0 < server.phases[0][1] <= server.ready_s
    server.stop()
    assert server.process.returncode is not None
    with served() as url:
        assert url == "http://127.0.0.1:1"


def test_a_server_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, DEAF + SERVES + STAYS)
    monkeypatch.setattr(module, "STOP_S", 0.1)
    server = start_server([])
    server.wait()
    server.stop()
    assert server.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "why"), [("print('no room')", "has ended: no room"), (STAYS, "not ready after 0 s")]
)
def test_a_server_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch, code: str, why: str) -> None:
    runs(monkeypatch, code)
    server = start_server([])
    try:
        with pytest.raises(ConfigError, match=why):
            server.wait(10.0 if "ended" in why else 0.2)
    finally:
        server.stop()
