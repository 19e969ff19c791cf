"""Keys that nobody can send, that others can see; sockets that stay behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from paceline.core.errors import ConfigError
from paceline.serve.server import HttpConfig
from paceline.serve.worker.socket_folder import PREFIX, SECONDS_TO_LOCK, socket_folder
from tests.serve.conftest import COMMAND, running
from tests.serve.test_faults import eventually

KEY = "open-sesame"


@pytest.mark.parametrize("key", [" ", "a b", "a\n", "\x7f", "\x00", "ключ", "a\tb", "\u2003"])
def test_a_key_that_no_client_can_send_is_refused(key: str) -> None:
    """L5: refused when it is set, without being quoted."""
    with pytest.raises(ConfigError, match="visible ASCII") as found:
        HttpConfig(api_key=key)
    assert key not in str(found.value).replace(" ", "") or not key.strip()


def test_a_key_on_the_command_line_is_warned_of(model: Path) -> None:
    """L6: a line at the start, which does not hold the key."""
    arguments = ["serve", "--port", "0", "--model", str(model / "nonesuch"), "--api-key", KEY]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert "PACELINE_API_KEY" in done.stderr
    assert KEY not in done.stderr + done.stdout


def test_the_engine_does_not_hold_the_key_and_no_socket_stays(model: Path) -> None:
    """L4, L6: not in its environment; no folder is left after SIGKILL, while it runs or loads."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        environment = {"PACELINE_API_KEY": KEY, "TMPDIR": folder}
        with running(model, env=environment) as server:
            engine = server.engine_pid()
            assert KEY.encode() in Path(f"/proc/{server.process.pid}/environ").read_bytes()
            assert KEY.encode() not in Path(f"/proc/{engine}/environ").read_bytes()
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
            assert list(Path(folder).iterdir()) == []
            assert eventually(lambda: not Path(f"/proc/{engine}").exists())
        arguments = ["serve", "--port", "0", "--model", str(model), "--threads", "1"]
        command = [*COMMAND, *arguments, "--draft", "off"]
        with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL) as loading:
            try:
                assert eventually(lambda: psutil.Process(loading.pid).children())
                engines = psutil.Process(loading.pid).children()
                for child in engines:
                    child.suspend()  # one that connects at once leaves no time to look
                assert eventually(lambda: any(Path(folder).glob("*/engine")))
            finally:
                loading.kill()
            for child in engines:
                child.resume()
        assert len(list(Path(folder).iterdir())) == 1
        with running(model, env=environment):
            assert list(Path(folder).iterdir()) == []


def test_a_folder_that_is_not_locked_goes_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server killed before it locked its folder leaves it; one that is being made stays.

    So does one that is locked, though all in it was removed.
    """
    with tempfile.TemporaryDirectory(prefix="t-") as parent:  # a path that is short enough for a socket
        monkeypatch.setattr(tempfile, "tempdir", parent)
        old, young = Path(parent) / f"{PREFIX}old", Path(parent) / f"{PREFIX}young"
        old.mkdir()
        young.mkdir()
        os.utime(old, (0, young.stat().st_mtime - 2 * SECONDS_TO_LOCK))
        with socket_folder() as living:
            assert not old.exists()
            assert young.exists()
            os.utime(living, (0, young.stat().st_mtime - 2 * SECONDS_TO_LOCK))
            with socket_folder():
                assert living.exists()


def test_what_has_not_ended_keeps_a_dead_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        dead = Path(parent) / f"{PREFIX}dead"
        (dead / "session").mkdir(parents=True)
        with socket_folder(end=lambda _: False):
            assert dead.exists()
        with socket_folder():
            assert not dead.exists()


def test_a_forked_child_leaves_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        with socket_folder() as folder:
            with monkeypatch.context() as patch, ExitStack() as left:
                child = left.enter_context(socket_folder())
                patch.setattr(os, "getpid", lambda: -1)
                left.close()
            assert child.exists()
        assert not folder.exists()
