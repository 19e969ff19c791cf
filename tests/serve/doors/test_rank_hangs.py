"""A rank on cores that is stopped or killed: its engine ends with a message and is replaced, and no rank stays."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import psutil

from tests.serve.conftest import PATIENCE_S, running, write_model
from tests.serve.test_faults import LONG, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serve.conftest import Server

LIMIT_S = 5
SHARED = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
SAID = {
    signal.SIGSTOP: "ranks hang, as rank 1 is stopped",
    signal.SIGKILL: "rank 1 has ended, killed by signal 9",
}


def ranks_of(server: Server) -> list[psutil.Process]:
    try:
        engine = psutil.Process(server.engine_pid())
        return [one for one in engine.children() if any("native.follower" in word for word in one.cmdline())]
    except (StopIteration, psutil.NoSuchProcess):  # it is being replaced
        return []


def has_ended(process: psutil.Process) -> bool:
    """Also one that its parent has not waited for, or whose parent ended with it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_rank_that_is_lost_in_a_pass_replaces_the_engine(tmp_path: Path) -> None:
    model = write_model(tmp_path, **SHARED)
    flags = ("--backend", "native", "--tensor-parallel", "2", "--watchdog-seconds", str(LIMIT_S))
    with (tmp_path / "log").open("w+") as log, running(model, *flags, stderr=log) as server:
        for number, said in SAID.items():
            engine, (rank,) = server.engine_pid(), ranks_of(server)
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE_S)
                assert eventually(lambda: server.metric("paceline_requests_running") > 0)
                rank.send_signal(number)
                assert asked.result().status_code == 503
            assert eventually(lambda old=engine: server.health() == 200 and server.engine_pid() != old)
            assert said in (tmp_path / "log").read_text()
            assert has_ended(rank)
            assert len(ranks_of(server)) == 1
        last = ranks_of(server)[0]
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert eventually(lambda: has_ended(last))
