"""An engine process as its parent holds it."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.serve.worker import child
from paceline.serve.worker.child import EngineChild


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_end_of_a_process_is_seen_while_all_threads_of_the_loop_are_taken(
    has_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: int) -> int:
        raise OSError("no such call")

    monkeypatch.setattr(child, "COMMAND", ["cat"])  # ends with its stdin
    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", none)
    free = threading.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        taken = loop.run_in_executor(None, free.wait)
        try:
            process = EngineChild()
            process.let_go()
            assert await asyncio.wait_for(process.wait(), 120.0) == 0
        finally:
            free.set()
            await taken

    asyncio.run(scenario())


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("4", "4")])
def test_numpy_has_one_thread_unless_told(given: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "COMMAND", ["sh", "-c", f'test "$OPENBLAS_NUM_THREADS" = {found}'])
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    process = child.begin()
    assert process is not None
    assert asyncio.run(asyncio.wait_for(process.wait(), 120.0)) == 0
