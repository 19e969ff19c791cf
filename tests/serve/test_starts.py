"""Starts that fail, and starts that are broken off."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from paceline.core.errors import ConfigError, EngineDied
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.assembly.config import EngineConfig
from paceline.serve.fleet.engine_fleet import EngineFleet
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.server import HttpConfig, HttpServer, listen, log_level, start_engines
from paceline.serve.tokenizer_cache import TokenizerCache
from paceline.serve.worker import child
from paceline.serve.worker.client import EngineClient
from tests.serve.conftest import COMMAND

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paceline.core.errors import PacelineError
    from paceline.serve.worker.messages import Ready

HANGS_S = 120.0  # what takes so long never ends
ENDS = "pass"
NEVER_CONNECTS = "import time; time.sleep(600)"
SPEAKS_OTHERWISE = (
    "import json, sys, time, zmq\n"
    "link = zmq.Context().socket(zmq.PAIR); link.connect(json.loads(sys.stdin.readline())[0])\n"
    "link.recv(); link.send(b'of another version'); time.sleep(600)"
)


def engines_run(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let every engine process run this code instead."""

    command = [sys.executable, "-c", code]
    monkeypatch.setattr(child, "COMMAND", command)


def run(scenario: Callable[[], Awaitable[Any]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), HANGS_S)

    asyncio.run(bounded())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_an_engine_that_ends_before_it_connects_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engines_run(monkeypatch, ENDS)

    async def scenario() -> None:
        client = EngineClient(EngineConfig())
        with pytest.raises(EngineDied, match="while loading"):
            await client.first_ready
        await client.stop()

    run(scenario)


def test_an_engine_of_another_version_of_the_package_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engines_run(monkeypatch, SPEAKS_OTHERWISE)

    async def scenario() -> None:
        client = EngineClient(EngineConfig())
        with pytest.raises(EngineDied, match="another version is installed"):
            await client.first_ready
        await client.stop()

    run(scenario)


@pytest.mark.parametrize("kill_first", [False, True])
def test_an_engine_that_never_connects_can_be_stopped(monkeypatch: pytest.MonkeyPatch, kill_first: bool) -> None:
    engines_run(monkeypatch, NEVER_CONNECTS)

    async def scenario() -> None:
        client = EngineClient(EngineConfig())
        await until(lambda: client._engine is not None)
        process = client._engine.process  # type: ignore[union-attr]
        if kill_first:
            client.kill()
        await client.stop()
        assert process.returncode is not None
        assert client.first_ready.cancelled()

    run(scenario)


def test_an_engine_that_ends_at_every_restart_is_started_again(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    async def scenario() -> None:
        client = EngineClient(EngineConfig(model=str(model), draft="off", threads=1))
        await client.first_ready
        engines_run(monkeypatch, ENDS)
        client._engine.process.kill()  # type: ignore[union-attr]
        await until(lambda: client.restarts == 2)
        await client.stop()

    run(scenario)


def test_nothing_waits_for_an_engine_that_is_gone(model: Path) -> None:
    """Between an engine's end and the news of it, its socket has no peer."""

    async def scenario() -> None:
        client = EngineClient(EngineConfig(model=str(model), draft="off", threads=1))
        await client.first_ready
        engine = client._engine
        assert engine is not None
        engine.process.kill()
        requests = [Request("r", (65,), SamplingParams(max_tokens=3), seed=1)]
        while engine.socket._socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            pass  # no other task runs, so the client knows nothing yet
        with pytest.raises(EngineDied):
            await client.submit(requests)
        await client.stop()

    run(scenario)


def test_an_engine_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: object, **__: object) -> None:
        raise OSError("no process left")

    monkeypatch.setattr(subprocess, "Popen", spawn)
    assert child.begin() is None

    async def scenario() -> None:
        client = EngineClient(EngineConfig())
        with pytest.raises(EngineDied, match="no process left"):
            await client.first_ready
        await client.stop()

    run(scenario)


@pytest.mark.parametrize("name", ["a b", "x" * 120, "☃" * 25])
def test_an_engine_starts_whatever_the_temporary_folder_is_called(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, name: str
) -> None:
    """A unix socket's path may have about 100 bytes."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def scenario() -> None:
        client = EngineClient(EngineConfig(model=str(model), draft="off", threads=1))
        await client.first_ready
        assert list(folder.iterdir()) == []
        await client.stop()

    run(scenario)


def test_an_engine_is_ready_once_it_is_prepared_for(model: Path) -> None:
    """The server makes its tokenizer meanwhile, so that no request waits for that."""

    async def scenario() -> None:
        prepared: list[Ready] = []

        async def prepare(ready: Ready) -> None:
            assert client.ready is None
            await asyncio.sleep(0.01)
            prepared.append(ready)

        client = EngineClient(EngineConfig(model=str(model), draft="off", threads=1), prepare=prepare)
        assert [await client.first_ready] == prepared
        await client.stop()

    run(scenario)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ConfigError("no such tokenizer"), ConfigError), (ValueError("no such tokenizer"), EngineDied)],
)
def test_an_engine_that_cannot_be_prepared_for_is_told(
    model: Path, error: Exception, kind: type[PacelineError]
) -> None:
    async def refuse(_: Ready) -> None:
        raise error

    async def scenario() -> None:
        client = EngineClient(EngineConfig(model=str(model), draft="off", threads=1), prepare=refuse)
        with pytest.raises(kind, match="no such tokenizer"):
            await client.first_ready
        await client.stop()

    run(scenario)


def test_a_restarted_engine_finds_the_tokenizer_of_the_first(model: Path) -> None:
    async def scenario() -> None:
        cache = TokenizerCache()
        client = EngineClient(EngineConfig(model=str(model), draft="off", threads=1), prepare=cache.of)
        first = await client.first_ready
        prompts = await cache.of(first)
        client._engine.process.kill()  # type: ignore[union-attr]
        await until(lambda: client.restarts == 1 and client.ready is not None)
        assert client.ready is not first
        assert await cache.of(client.ready) is prompts  # type: ignore[arg-type]
        await client.stop()

    run(scenario)


def test_a_port_that_is_held_is_no_other_servers() -> None:
    async def scenario() -> None:
        first = HttpServer(HttpConfig(port=0), lambda _: EngineFleet(ReplicaOptions()))
        port = first.socket.getsockname()[1]
        late = HttpServer(HttpConfig(port=port), lambda _: EngineFleet(ReplicaOptions()))
        first.hold()
        with pytest.raises(ConfigError, match=f"cannot listen on port {port}"):
            late.hold()
        first.abandon()
        late.abandon()

    run(scenario)


def test_flags_that_want_a_second_replica_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines_run(monkeypatch, NEVER_CONNECTS)

    async def scenario() -> None:
        http = HttpConfig(port=0, fleet=ReplicaOptions(hedge="p95", tail="spread"))
        server = HttpServer(http, partial(start_engines, http, EngineConfig()))
        server.abandon()

    run(scenario)
    assert "--hedge, --tail: nothing to do without a second replica" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_while_the_model_loads_ends_the_server_quietly(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, times: int
) -> None:
    engines_run(monkeypatch, NEVER_CONNECTS)

    async def scenario() -> None:
        http = HttpConfig(port=0)
        server = HttpServer(http, partial(start_engines, http, EngineConfig()))
        running = asyncio.create_task(server.run(_never_ready))
        await until(lambda: server._server.started and server.client.pid is not None)
        for _ in range(times):
            signal.raise_signal(number)
        await running
        assert server.client.pid is None

    run(scenario)


def _never_ready(*_: object) -> None:
    raise AssertionError("no engine is ready")


def test_a_start_that_fails_says_why_and_nothing_else(tmp_path: Path) -> None:
    command = [*COMMAND, "serve", "--port", "0", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    *before, last = done.stderr.splitlines()
    assert last.startswith("error: ")
    assert before in ([], ["loading the model ..."])


def test_a_bug_in_the_http_side_ends_the_server_with_its_error() -> None:
    code = (
        "from paceline import cli; from paceline.serve import server\n"
        "server.make_app = lambda *_: 1 / 0\n"
        "raise SystemExit(cli.main(['serve', '--port', '0', '--model', 'shape:num_layers=1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_the_engine_begins_before_the_server_is_imported(tmp_path: Path) -> None:
    """Both import at once; help and the printed configuration need no engine."""
    code = (
        "import sys; from paceline import cli; from paceline.serve.worker import child\n"
        "child.begin = lambda: print('begun', 'paceline.serve.server' in sys.modules, 'numpy' in sys.modules)\n"
        "raise SystemExit(cli.main(sys.argv[1:]))"
    )
    for flags, told in ((["--port", "-1"], "begun False False\n"), (["--help"], ""), (["--print-config"], "")):
        command = [sys.executable, "-c", code, "serve", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.stdout.startswith(told)
        assert ("begun" in done.stdout) == bool(told), done.stdout[:200]


NOT_FOR_SERVING = {"torch", "jinja2", "llguidance", "rich", "gguf", "huggingface_hub"}
ENGINE_STARTS = """
import sys
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.build import build
from paceline.serve.worker.process import warm_up
config = EngineConfig(model=sys.argv[1], draft="suffix:k=2", threads=1, kv_tokens=1024, backend="native")
warm_up(build(config, None, lambda *_: None))
"""


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        (ENGINE_STARTS, NOT_FOR_SERVING | {"starlette", "uvicorn", "httptools", "prometheus_client"}),
        ("import paceline.serve.server", NOT_FOR_SERVING),
    ],
    ids=["engine", "server"],
)
def test_a_start_imports_only_what_it_uses(code: str, unwanted: set[str], model: Path) -> None:
    told = f"import sys; print(sorted(set(sys.modules) & {unwanted}))"
    command = [sys.executable, "-c", f"{code}\n{told}", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "[]\n", done.stderr


SHAPE = "shape:num_layers=6,hidden_size=1024,intermediate_size=2816,vocab_size=512"
PRIVATE = """
def dirty():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))

import paceline.backend.native.load, paceline.serve.worker.process
before = dirty()
"""
TELL = "print(dirty() - before)"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads what Linux tells of memory")
def test_a_second_engine_shares_its_weights(tmp_path: Path) -> None:
    """Beside its imports it has only KV, work space and what it knows of its model."""
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", f"{PRIVATE}{ENGINE_STARTS}{TELL}", SHAPE]
        environment = os.environ | {"PACELINE_CACHE": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, env=environment)
        found.append(int(done.stdout))
    (packed,) = (tmp_path / "packed").glob("*.packed")
    assert packed.stat().st_size > 50e6
    assert found[1] < packed.stat().st_size / 4, found


def test_an_engine_that_is_not_needed_ends_quietly() -> None:
    command = [*COMMAND, "serve", "--port", "-1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False
    )  # until both have ended
    assert done.stderr == "error: --port must be between 0 and 65535, not -1\n"


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example", "nosuchhost.invalid", "203.0.113.1"])
def test_a_host_that_cannot_be_had_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match="--host") as told:
        listen(host, 0)
    assert "--port" not in str(told.value)


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="another --port"):
            listen("127.0.0.1", taken.getsockname()[1])


def test_a_bad_log_level_is_told_with_the_good_ones() -> None:
    assert log_level({}) == "WARNING"
    assert [log_level({"PACELINE_LOG_LEVEL": name}) for name in ("debug", "WARN")] == ["DEBUG", "WARN"]
    with pytest.raises(ConfigError, match="DEBUG, INFO, WARNING, ERROR, CRITICAL, not 'FOO'"):
        log_level({"PACELINE_LOG_LEVEL": "foo"})
