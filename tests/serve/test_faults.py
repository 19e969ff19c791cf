"""Clients that go away, an engine that is killed, a server that is told to stop, keys, broken messages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import zmq

from paceline.core.errors import ConfigError, EngineDied
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Outcome, Request
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.wire import Failed, Submit, encode
from paceline.serve.server import HttpConfig
from paceline.serve.worker.child import COMMAND
from paceline.serve.worker.client import EngineClient, _message
from paceline.serve.worker.messages import (
    Load,
    OutcomeBatch,
    Ready,
    Rejected,
    Snapshot,
    StopEngine,
    decode_to_server,
)
from paceline.serve.worker.socket_folder import socket_folder
from tests.serve.conftest import OUTLASTING, PATIENCE_S, running

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.serve.conftest import Server

LONG = {"prompt": "the cat", "max_tokens": 12_000, "ignore_eos": True, "temperature": 1.5}
OUTLASTS = LONG | {"max_tokens": 120_000}  # a test; of servers with `OUTLASTING`


def eventually(holds: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if holds():
            return True
        time.sleep(0.02)
    return False


def start_streams(server: Server, count: int) -> tuple[ThreadPoolExecutor, list[Any], threading.Barrier]:
    """Start streams. Each waits at the barrier once it has had its first chunk. A future holds the last data."""
    barrier = threading.Barrier(count + 1)

    def read() -> list[str]:
        waiting = True
        data: list[str] = []
        body = OUTLASTS | {"stream": True}
        with (
            httpx.Client(timeout=PATIENCE_S) as client,
            client.stream("POST", f"{server.url}/v1/completions", json=body) as response,
        ):
            for line in response.iter_lines():
                if waiting:
                    waiting = barrier.wait() < 0
                if line:
                    data = [*data[-1:], line.removeprefix("data: ")]
        return data

    pool = ThreadPoolExecutor(count)
    futures = [pool.submit(read) for _ in range(count)]
    return pool, futures, barrier


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_request(server: Server, stream: bool) -> None:
    """The client sends its request, and closes the connection once both answers are being written."""
    cancelled = 'paceline_requests_total{finish_reason="cancelled"}'
    before, address = server.metric(cancelled), httpx.URL(server.url)
    body = json.dumps(LONG | {"stream": stream, "n": 2}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert eventually(lambda: server.metric("paceline_requests_running") == 2)
    assert eventually(lambda: server.metric(cancelled) == before + 2)
    assert eventually(lambda: server.metric("paceline_requests_open") == 0)
    assert eventually(lambda: server.metric("paceline_requests_running") == 0)
    assert server.metric(cancelled) == before + 2


def test_an_engine_that_is_killed_fails_its_requests_and_comes_back(long_model: Path) -> None:
    """All end soon: sooner than the watchdog would have noticed, which is told to wait for ever."""
    with running(long_model, *OUTLASTING, "--watchdog-seconds", "0") as server:
        pool, futures, barrier = start_streams(server, 8)
        with pool:
            barrier.wait(PATIENCE_S)
            whole_pool = ThreadPoolExecutor(1)
            url = f"{server.url}/v1/completions"
            whole = whole_pool.submit(httpx.post, url, json=OUTLASTS, timeout=PATIENCE_S)
            assert eventually(lambda: server.metric("paceline_requests_open") == 9)
            os.kill(server.engine_pid(), signal.SIGKILL)
            for future in futures:
                data = future.result()
                assert json.loads(data[0])["error"]["code"] == "engine_unavailable"
                assert data[1] == "[DONE]"
            response = whole.result()
            assert response.status_code == 503
            assert response.headers["retry-after"]
            whole_pool.shutdown()
        assert eventually(lambda: server.metric("paceline_engine_restarts_total") == 1)
        assert eventually(lambda: server.health() == 200)
        assert server.metric("paceline_engine_restarts_total") == 1
        again = httpx.post(url, json={"prompt": "a", "max_tokens": 2, "seed": 1}, timeout=PATIENCE_S)
        assert again.status_code == 200


def test_sigterm_finishes_what_is_open_and_refuses_what_is_new(model: Path) -> None:
    """The engine is stopped meanwhile, or it might be done before the second request comes."""
    with running(model, "--watchdog-seconds", "0") as server:
        url, engine = f"{server.url}/v1/completions", server.engine_pid()
        with ThreadPoolExecutor(1) as pool:
            open_one = pool.submit(httpx.post, url, json=LONG | {"max_tokens": 6000}, timeout=PATIENCE_S)
            assert eventually(lambda: server.metric("paceline_requests_running") == 1)
            os.kill(engine, signal.SIGSTOP)
            server.terminate()
            assert eventually(lambda: server.health() == 503)
            refused = httpx.post(url, json={"prompt": "a"}, timeout=PATIENCE_S)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            os.kill(engine, signal.SIGCONT)
            done = open_one.result()
            assert done.json()["usage"]["completion_tokens"] == 6000
        assert server.process.wait(PATIENCE_S) == 0


def test_the_drain_has_an_end(long_model: Path) -> None:
    with running(long_model, "--drain-seconds", "0.2", *OUTLASTING) as server:
        url = f"{server.url}/v1/completions"
        with ThreadPoolExecutor(1) as pool:
            open_one = pool.submit(httpx.post, url, json=OUTLASTS, timeout=PATIENCE_S)
            assert eventually(lambda: server.metric("paceline_requests_running") == 1)
            server.terminate()
            assert open_one.result().status_code == 503
        assert server.process.wait(PATIENCE_S) == 0


def test_a_signal_to_all_processes_of_a_fleet_lets_each_finish_its_own(model: Path, tmp_path: Path) -> None:
    """An idle replica hears of it late, and the first one that is done is not started anew."""
    with (tmp_path / "log").open("w+") as log, running(model, "--replicas", "2", stderr=log) as server:

        def replicas() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = httpx.get(f"{server.url}/v1/fleet", timeout=PATIENCE_S).json()[
                "replicas"
            ]
            return found

        assert eventually(lambda: [line["state"] for line in replicas()] == ["up"] * 2)
        with ThreadPoolExecutor(1) as pool:
            body = LONG | {"max_tokens": 8000, "seed": 1}
            open_one = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
            assert eventually(lambda: sum(line["rows"] for line in replicas()) == 1)
            for pid in (server.process.pid, *(line["pid"] for line in replicas())):
                os.kill(pid, signal.SIGTERM)
            usage = open_one.result().json()["usage"]
        assert (usage["completion_tokens"], usage.get("legs", 1)) == (8000, 1)
        assert server.process.wait(PATIENCE_S) == 0
        log.seek(0)
        assert "restarting" not in log.read()


def test_a_job_larger_than_max_open_is_not_told_to_try_again(model: Path) -> None:
    with running(model, "--max-open", "2") as server, server.client() as http:
        for asked in (
            {"prompt": "the", "n": 3},
            {"prompt": ["the"] * 3},
            {"prompt": "the", "n": 3, "stream": True},
        ):
            refused = http.post("/v1/completions", json={"max_tokens": 2} | asked)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == "n"
            assert "--max-open 2" in refused.json()["error"]["message"]
        fits = {"prompt": "the", "n": 2, "max_tokens": 2}
        assert http.post("/v1/completions", json=fits).status_code == 200


def test_the_key_guards_every_route_but_health(model: Path) -> None:
    with running(model, "--max-open", "2", env={"PACELINE_API_KEY": "sesame"}) as server:
        assert server.health() == 200
        for path in ("/metrics", "/version", "/v1/models", "/nothing"):
            assert httpx.get(server.url + path).status_code == 401
        for given in ("Bearer sesam", "Bearer sesame2", "sesame", "Basic sesame", "Bearer \xe9"):
            headers = {"authorization": given.encode("latin-1")}
            response = httpx.post(f"{server.url}/v1/completions", content=b"x", headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert server.metric('paceline_refused_total{status="401"}', authorization="Bearer sesame") == 9
        with server.client(headers={"authorization": "Bearer sesame"}) as client:
            assert client.get("/v1/models").status_code == 200
            long = {"prompt": "a", "n": 2, "stream": True, "max_tokens": 16000, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=long) as answers:
                lines = answers.iter_lines()  # dropped, it would close the stream
                next(lines)
                full = client.post("/v1/completions", json={"prompt": "a"})
            assert full.status_code == 429, full.text
            assert full.headers["retry-after"] == "1"
        # the engine lives no longer than its server
        engine = server.engine_pid()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        assert eventually(lambda: not _alive(engine))


def test_a_server_that_is_killed_leaves_no_folder_behind(model: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as folder, running(model, env={"TMPDIR": folder}) as server:
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        assert list(Path(folder).iterdir()) == []


def test_the_first_request_after_a_start_is_counted_as_the_first(model: Path) -> None:
    with running(model) as server, server.client() as http:
        assert server.metric("paceline_steps_total") == server.metric("paceline_output_tokens_total") == 0
        assert http.post("/v1/completions", json={"prompt": "the", "max_tokens": 2}).status_code == 200
        assert server.metric("paceline_output_tokens_total") == 2


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_other_machines_need_a_key() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        HttpConfig(host="0.0.0.0")
    assert HttpConfig(host="0.0.0.0", api_key="k").api_key
    assert HttpConfig(host="0.0.0.0", insecure=True).insecure


def test_a_server_does_not_import_torch() -> None:
    code = "import sys, paceline.serve.server; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0


def test_broken_messages_do_not_end_the_engine(model: Path) -> None:
    with socket_folder() as folder, zmq.Context() as context, context.socket(zmq.PAIR) as link:
        address = f"ipc://{folder}/s"
        link.bind(address)
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None
        process.stdin.write(json.dumps((address, "", [])).encode() + b"\n")
        process.stdin.flush()
        try:
            link.send(encode(Load(EngineConfig(model=str(model), draft="off", threads=1))))
            assert _next(link, Ready).vocab_size == 320
            for data in (b"", b"\xff" * 100, b"\x91" * 5000, b"\x80", encode({"type": "Submit"}), b"\xc1"):
                link.send(data)
            link.send(encode(Load(EngineConfig())))  # out of place
            request = Request("r", (65, 66), SamplingParams(max_tokens=3), seed=1)
            bad = Submit("bad", (65,), {"temperature": -1}, 1)
            link.send(encode(bad))
            assert _next(link, Rejected).request_id == "bad"
            link.send(encode(Submit("worse", (65,), {"colour": "red"}, 1)))
            assert _next(link, Rejected).request_id == "worse"
            link.send(encode(Submit.of(request)))
            assert _next(link, OutcomeBatch).outcomes[0].request_id == "r"
            assert _next(link, Snapshot)
            link.send(encode(StopEngine()))
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
            process.stdin.close()


def test_broken_messages_do_not_end_the_server(model: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(EngineConfig(model=str(model), draft="off", threads=1))
        try:
            await client.first_ready
            engine = client._engine
            assert engine is not None
            strangers = OutcomeBatch((Outcome("nobody", (1,), "a"),)), Rejected("nobody", "QueueFull", "full")
            for data in (b"", b"\xff" * 100, b"\x91" * 5000, b"\xc1", *map(encode, strangers)):
                client._handle(engine, _message(data))
            answers = await client.submit([Request("r", (65, 66), SamplingParams(max_tokens=3), seed=1)])
            index, outcome = await answers.next()  # type: ignore[misc]
            assert (index, outcome.request_id) == (0, "r")
            await answers.close()
        finally:
            await client.stop()
        with pytest.raises(EngineDied):
            await client.submit([])

    asyncio.run(scenario())


def _next(link: zmq.Socket[bytes], kind: type[Any]) -> Any:
    """Return the next message of a kind."""
    while link.poll(int(1000 * PATIENCE_S)):
        message = decode_to_server(link.recv())
        assert not isinstance(message, Failed), message
        if isinstance(message, kind):
            return message
    raise AssertionError(f"no {kind.__name__} came")
