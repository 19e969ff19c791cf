"""A joined cluster: its head dies and comes back; commands that joined it are killed, and end as others begin."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve.conftest import write_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30  # of Ray's processes for a head that is away, more than an answer takes; 60 by default
BODY = {"prompt": "the", "max_tokens": 3500, "seed": 1, "temperature": 0.9, "ignore_eos": True, "stream": True}

pytestmark = [
    pytest.mark.ray,
    pytest.mark.nightly,  # Ray is started twice
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'paceline[ray]'"
    ),
]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


class Cluster:
    """A head of Ray with one node, on loopback."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.environment = os.environ | {
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(PATIENCE_S),
            "RAY_ADDRESS": f"127.0.0.1:{self.port}",
        }
        self._head: subprocess.Popen[bytes] | None = None
        self.left = ExitStack()  # what must not outlive the test

    def start(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True)
        temp = self.left.enter_context(folder)  # sockets have short names
        options = f"--port={self.port} --temp-dir={temp} --node-ip-address=127.0.0.1 --num-cpus=2 --block".split()
        options += ["--include-dashboard=false", "--object-store-memory=80000000"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options]
        log = (self.folder / "head.log").open("ab")
        self._head = subprocess.Popen(
            command, stdout=log, stderr=log, env=self.environment, start_new_session=True
        )

    def kill_head(self) -> None:
        """End the process that knows the cluster, as by a lost machine, but no other.

        The command that started it would end all others within a second, so it is stopped until `lose_rest`.
        """
        command = self._command()
        command.suspend()
        (gcs,) = [p for p in command.children(recursive=True) if "gcs_server" in p.name()]
        gcs.kill()

    def lose_rest(self) -> None:
        self._command().resume()

    def hosts(self) -> list[psutil.Process]:
        """Return the actors that have engines."""
        import psutil

        found = []
        for process in self._command().children(recursive=True):
            with suppress(psutil.Error):
                found += [process] if "EngineHost" in " ".join(process.cmdline()) else []
        return found

    def _command(self) -> psutil.Process:
        import psutil

        assert self._head is not None
        return psutil.Process(self._head.pid)

    def end(self) -> None:
        if self._head is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._head.pid, signal.SIGKILL)
            self._head.wait()

    def close(self) -> None:
        self.end()
        self.left.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "home").mkdir()
    found = Cluster(tmp_path)
    yield found
    found.close()


def serving(cluster: Cluster, model: Path, port: int, replicas: int = 2) -> subprocess.Popen[bytes]:
    flags = f"--on ray --replicas {replicas} --threads 1 --port {port}".split()
    flags += ["--draft", "ngram:k=3", "--packed-cache-bytes", "0"]
    log = (cluster.folder / "serve.log").open("ab")
    command = [sys.executable, "-m", "paceline.cli", "serve", *flags, "--model", str(model)]
    found = subprocess.Popen(command, stdout=log, stderr=log, env=cluster.environment, cwd=ROOT)
    cluster.left.callback(found.kill)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(180):
            with suppress(httpx.HTTPError):
                if client.get("/health", timeout=2).status_code == 200:
                    return found
            assert found.poll() is None, (cluster.folder / "serve.log").read_text()[-3000:]
            time.sleep(0.5)
    raise AssertionError("the application did not come up")


def text_of(port: int, begun: threading.Event | None = None) -> str:
    pieces: list[str] = []
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=BODY, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if begun is not None:
                    begun.set()
    return "".join(pieces)


def test_answers_outlive_the_head_and_a_new_one_writes_the_same(cluster: Cluster, tmp_path: Path) -> None:
    model, port = write_model(tmp_path), free_port()
    cluster.start()
    time.sleep(8)
    command = serving(cluster, model, port)
    whole = text_of(port)
    cut: list[Any] = []
    begun = threading.Event()
    stream = threading.Thread(target=lambda: cut.append(text_of(port, begun)))
    stream.start()
    assert begun.wait(30)
    cluster.kill_head()
    stream.join(60)
    assert cut == [whole], "the stream that was open goes on without the head"
    cluster.lose_rest()
    assert command.wait(120) != 0, "the command ends with an error, so that a supervisor starts it anew"
    cluster.end()
    cluster.start()
    time.sleep(8)
    again = serving(cluster, model, port)
    try:
        assert text_of(port) == whole
    finally:
        again.terminate()
        again.wait(60)


def test_the_engines_of_a_killed_command_end(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start()
    time.sleep(8)
    model = write_model(tmp_path)
    first, second = serving(cluster, model, free_port(), 1), serving(cluster, model, free_port(), 1)
    assert len(cluster.hosts()) == 2
    first.kill()
    for _ in range(60):
        if len(cluster.hosts()) < 2:
            break
        time.sleep(0.5)
    time.sleep(5)
    assert len(cluster.hosts()) == 1, "the other command's engine stays, and Ray starts none anew"
    second.terminate()
    third = serving(cluster, model, free_port(), 1)  # it begins while the other one ends
    assert second.wait(60) == 0
    assert len(cluster.hosts()) == 1
    third.terminate()
    assert third.wait(60) == 0
    assert cluster.hosts() == []
