"""An engine that hangs: noticed, taken out of service, replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from paceline.core import watchdog
from paceline.core.errors import ConfigError
from paceline.core.watchdog import PATIENCE, TICK_S, Watchdog, process_work, thread_states
from paceline.serve.server import HttpConfig
from tests.serve.conftest import PATIENCE_S, running
from tests.serve.test_faults import LONG, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Server

LIMIT_S = 12  # of silence; an engine is out of service after 0.4 of it
SPINS_BESIDE = """
import threading
def spin():
    print(flush=True)
    while True: pass
threading.Thread(target=spin).start()
"""
SEEDED = LONG | {"max_tokens": 4000, "seed": 3}


@pytest.fixture(scope="module")
def watched(model: Path) -> Iterator[Server]:
    with running(model, "--watchdog-seconds", str(LIMIT_S)) as server:
        yield server


def ask(server: Server, body: dict[str, object]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)


def test_a_pause_within_the_limit_loses_nothing(watched: Server) -> None:
    """H3: texts are equal after SIGSTOP and SIGCONT, though the server was out of service meanwhile."""
    expected = ask(watched, SEEDED).json()["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, watched, SEEDED) for _ in range(4)]
        assert eventually(lambda: watched.metric("paceline_requests_running") > 0)
        engine = watched.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            assert eventually(lambda: watched.health() == 503)
            assert watched.metric("paceline_engine_up") == 0
            refused = ask(watched, SEEDED)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        finally:
            os.kill(engine, signal.SIGCONT)
        assert [found.result().json()["choices"][0]["text"] for found in asked] == [expected] * 4
    assert eventually(lambda: watched.health() == 200)
    assert watched.metric("paceline_engine_up") == 1
    assert watched.metric("paceline_engine_restarts_total") == 0


def test_an_engine_that_hangs_is_replaced(watched: Server) -> None:
    """H3: open requests end with an error, and others are served again."""
    expected = ask(watched, SEEDED).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, watched, LONG)
        assert eventually(lambda: watched.metric("paceline_requests_running") > 0)
        hung = watched.engine_pid()
        os.kill(hung, signal.SIGSTOP)
        assert eventually(lambda: watched.health() == 503)
        assert asked.result().status_code == 503
    assert eventually(lambda: watched.health() == 200)
    assert watched.engine_pid() != hung
    assert watched.metric("paceline_engine_restarts_total") == 1
    assert ask(watched, SEEDED).json()["choices"][0]["text"] == expected


def test_an_idle_engine_that_hangs_is_noticed_too(watched: Server) -> None:
    """H3: beats come without work as well."""
    engine = watched.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        assert eventually(lambda: watched.health() == 503)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert eventually(lambda: watched.health() == 200)


def test_a_long_pass_is_no_hang() -> None:
    """H3: a process that computes has `PATIENCE` times the limit, one that waits has not."""
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            dog = Watchdog((process.pid,), 5.0)
            for _ in range(int(4 * dog.limit_s / TICK_S)):  # of time that the dog is told
                time.sleep(0.02)
                dog.tick(TICK_S)
            assert not dog.late
            for _ in range(int(PATIENCE * dog.limit_s / TICK_S)):
                dog.tick(TICK_S)
            assert dog.hung
            dog.beat()
            assert not dog.late
        finally:
            process.kill()


@pytest.mark.parametrize(("share", "hangs"), [(0.01, True), (0.04, False)])
def test_a_process_that_hardly_computes_hangs(
    monkeypatch: pytest.MonkeyPatch, share: float, *, hangs: bool
) -> None:
    """The system counts in steps of 10 ms, more than a look's share: it is measured over all of the silence."""
    now_s = [0.0]
    monkeypatch.setattr(watchdog, "process_work", lambda _: ("S", int(100 * share * now_s[0]) / 100))
    monkeypatch.setattr(watchdog, "thread_states", lambda _: {"S"})
    dog = Watchdog((1,), 5.0)
    while now_s[0] < 2 * dog.limit_s:
        now_s[0] += TICK_S
        dog.tick(TICK_S)
        assert not (dog.hung and now_s[0] < dog.limit_s)
    assert dog.hung == hangs


def test_any_thread_that_runs_or_waits_for_a_disk_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", SPINS_BESIDE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert eventually(lambda: process_work(process.pid)[0] == "S")  # its first thread waits
            assert "R" in thread_states(process.pid)
        finally:
            process.kill()
    monkeypatch.setattr(watchdog, "process_work", lambda _: ("S", 0.0))
    monkeypatch.setattr(watchdog, "thread_states", lambda _: {"S", "D"})
    dog = Watchdog((1,), 5.0)
    for _ in range(int(2 * dog.limit_s / TICK_S)):
        dog.tick(TICK_S)
    assert not dog.late


def test_a_pause_of_the_server_blames_nobody() -> None:
    """H3: a long time between two looks counts as a short one."""
    dog = Watchdog((os.getpid(),), 5.0)
    dog.tick(3600.0)
    assert not dog.late
    off = Watchdog((os.getpid(),), 0.0)
    for _ in range(10_000):
        off.tick(TICK_S)
    assert not off.hung


@pytest.mark.parametrize("limit_s", [-1.0, 0.5, 1e9, float("nan"), float("inf")])
def test_limits_without_sense_are_refused(limit_s: float) -> None:
    with pytest.raises(ConfigError, match="--watchdog-seconds"):
        HttpConfig(watchdog_s=limit_s)
