"""The server's end of an engine's socket: nothing is lost or out of order, and nothing spins."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serve.worker.engine_socket import AT_ONCE, EngineSocket
from paceline.serve.worker.socket_folder import socket_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

LIMIT_S = 30.0  # for what comes at once, or never

Socket = zmq.Socket[bytes]


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    return run


@asynccontextmanager
async def ends(*, connected: bool = True) -> AsyncIterator[tuple[EngineSocket, Socket, str]]:
    """The server's end, the engine's, and the place where they meet."""
    with socket_folder() as folder, zmq.Context() as context, context.socket(zmq.PAIR) as engine:
        place = f"ipc://{folder}/engine"
        engine.setsockopt(zmq.LINGER, 0)
        engine.setsockopt(zmq.RCVTIMEO, int(LIMIT_S * 1000))
        server = EngineSocket(context)
        try:
            server.bind(place)
            if connected:
                engine.connect(place)
                await asyncio.wait_for(server.send_first(b"hello"), LIMIT_S)
                assert engine.recv() == b"hello"
            yield server, engine, place
        finally:
            server.close()


async def received(server: EngineSocket, count: int) -> list[bytes]:
    async with asyncio.timeout(LIMIT_S):
        return [await server.receive() for _ in range(count)]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["engine", "server", "turn"]), st.integers(1, 3)), max_size=12))
def test_whoever_sends_when_all_messages_come_in_order(steps: list[tuple[str, int]]) -> None:
    """A task waits all the time, or is behind; the server sends between."""

    async def run() -> None:
        async with ends() as (server, engine, _):
            sent = sum(n for who, n in steps if who == "engine")
            waiting = asyncio.create_task(received(server, sent))
            told, answered = 0, 0
            for who, count in steps:
                for _ in range(count):
                    if who == "engine":
                        engine.send(b"%d" % told)
                        told += 1
                    elif who == "server":
                        server.send(b"%d" % answered)
                        answered += 1
                    else:
                        await asyncio.sleep(0)
            assert await waiting == [b"%d" % i for i in range(sent)]
            assert [engine.recv() for _ in range(answered)] == [b"%d" % i for i in range(answered)]

    asyncio.run(run())


@in_a_loop
async def test_a_wait_that_is_cancelled_loses_nothing() -> None:
    async with ends() as (server, engine, _):
        waiting = asyncio.create_task(server.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        engine.send(b"one")
        engine.send(b"two")
        assert await received(server, 2) == [b"one", b"two"]
        assert server.receive_now() is None


@in_a_loop
async def test_what_comes_while_nobody_waits_does_not_wake_the_loop_again_and_again() -> None:
    """A task has waited and was cancelled, so the descriptor tells of the next message, and stays readable."""
    async with ends() as (server, engine, _):
        waiting = asyncio.create_task(server.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        loop, looks, look = asyncio.get_running_loop(), list[int](), server._readable
        loop.add_reader(server._descriptor, lambda: (looks.append(1), look()))
        engine.send(b"one")
        async with asyncio.timeout(LIMIT_S):
            while not looks:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert len(looks) == 1
        assert await received(server, 1) == [b"one"]


@in_a_loop
async def test_sending_waits_for_the_process_only_if_told_to() -> None:
    async with ends(connected=False) as (server, engine, place):
        with pytest.raises(zmq.Again):
            server.send(b"early")
        first = asyncio.create_task(server.send_first(b"load"))
        await asyncio.sleep(0)
        assert not first.done()
        engine.connect(place)
        await asyncio.wait_for(first, LIMIT_S)
        assert engine.recv() == b"load"


@in_a_loop
async def test_others_get_turns_though_messages_never_end() -> None:
    async with ends() as (server, _, _):
        server.receive_now = lambda: b"one more"
        turns = []

        async def other() -> None:
            for turn in range(3):
                turns.append(turn)
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await received(server, 4 * AT_ONCE)
        assert turns == [0, 1, 2]
        await task
