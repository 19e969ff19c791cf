"""KV events over ZMQ: three parts, numbers without a gap, and what was missed on request."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from paceline.core.errors import ConfigError
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.kv_event_options import KvEventsConfig, binds, events_config
from paceline.engine.pages import PagePool
from paceline.engine.wire import encode
from paceline.serve.asking import config_of
from paceline.serve.fleet.local import replica_configs
from paceline.serve.llm import LLM
from paceline.serve.worker.kv_publisher import KvPublisher
from paceline.serve.worker.messages import Load, decode_to_engine
from tests.engine.test_kv_events import chain_of, true_hash
from tests.oracles.kv_index import KvIndex
from tests.serve.conftest import running
from tests.serve.test_faults import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_MS = 20_000
END = b"\xff" * 8


def publish(pool: PagePool, number: int) -> int:
    """Have a page of a new text published, and return its hash."""
    text = (number,) * 16
    chain, [page] = chain_of(text), pool.take(1)
    pool.publish(page, chain.hashes[1], chain, 0)
    pool.give_back([page])
    return true_hash(text, "")


class Subscriber:
    """What a router has: a SUB socket, and one for replay."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, replay: str, topic: bytes) -> None:
        self.sub, self.ask = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.sub.connect(endpoint)
        self.ask.connect(replay)

    def next(self, wait_ms: int = WAIT_MS) -> tuple[bytes, int, bytes] | None:
        if not self.sub.poll(wait_ms):
            return None
        topic, number, payload = self.sub.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), payload

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        self.ask.send_multipart((b"", start.to_bytes(8, "big")))
        found: list[tuple[int, bytes]] = []
        while True:
            assert self.ask.poll(WAIT_MS)
            empty, topic, number, payload = self.ask.recv_multipart()
            assert empty == b""
            if number == END:
                assert topic == payload == b""
                return found
            assert topic in {b"", b"kv@here@tiny"}
            found.append((int.from_bytes(number, "big"), payload))

    def index(self) -> KvIndex:
        """Return an index of all that is kept."""
        index = KvIndex()
        for _, payload in self.replay(0):
            index.apply(payload)
        return index


@contextmanager
def publishing(tmp_path: Path, **options: object) -> Iterator[tuple[KvPublisher, Subscriber, PagePool]]:
    places = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    publisher = KvPublisher(KvEventsConfig(**places, topic="kv@here@tiny", **options))  # type: ignore[arg-type]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscriber = Subscriber(context, places["endpoint"], places["replay_endpoint"], b"kv@")
    try:
        yield publisher, subscriber, PagePool(3)
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_a_subscriber_who_came_late_asks_for_what_it_missed(tmp_path: Path) -> None:
    with publishing(tmp_path, rank=2) as (publisher, subscriber, pool):
        publisher.send(pool)
        sent = count()
        while (first := subscriber.next(5)) is None:  # it may connect only after some batches
            publish(pool, next(sent))
            publisher.send(pool)
        last = next(sent)
        publish(pool, last)
        publisher.send(pool)
        publisher.send(pool)  # nothing happened: nothing is sent
        index, numbers, (topic, number, payload) = KvIndex(), [], first
        assert topic == b"kv@here@tiny"
        for missed, batch in subscriber.replay(0):
            if missed < number:
                numbers.append(missed)
                index.apply(batch)
        while number <= last:
            numbers.append(number)
            index.apply(payload)
            following = subscriber.next()
            assert following is not None
            _, number, payload = following
        numbers.append(number)
        index.apply(payload)
        assert numbers == list(range(last + 2)), "the first one says that nothing is there"
        assert (index.clears, index.rank) == (1, 2)
        kept = range(max(0, last - 2), last + 1)
        assert index.pages == {true_hash((number,) * 16, "") for number in kept}


def test_replay_begins_where_it_is_asked_to_and_keeps_so_many(tmp_path: Path) -> None:
    with publishing(tmp_path, buffer_steps=4) as (publisher, subscriber, pool):
        publisher.send(pool)
        for number in range(8):
            publish(pool, number)
            publisher.send(pool)
        subscriber.ask.send_multipart((b"", b"short"))  # no answer, and no harm
        subscriber.ask.send_multipart((b"no request",))
        assert eventually(lambda: [number for number, _ in subscriber.replay(0)] == [5, 6, 7, 8])
        assert [number for number, _ in subscriber.replay(7)] == [7, 8]
        assert subscriber.replay(9) == []
        request = subscriber.ask.context.socket(zmq.REQ)
        request.connect(subscriber.ask.getsockopt(zmq.LAST_ENDPOINT))
        request.send((8).to_bytes(8, "big"))
        assert request.poll(WAIT_MS)
        assert request.recv_multipart()[:2] == [b"kv@here@tiny", (8).to_bytes(8, "big")]


def test_replays_for_older_routers_have_no_topic(tmp_path: Path) -> None:
    with publishing(tmp_path, event_form="array") as (publisher, subscriber, pool):
        publisher.send(pool)

        def ends() -> bool:
            subscriber.ask.send_multipart((b"", (0).to_bytes(8, "big")))
            assert subscriber.ask.poll(WAIT_MS)
            first = subscriber.ask.recv_multipart()
            if first == [b"", END, b""]:  # the batch is still on its way
                return False
            assert first[:2] == [b"", (0).to_bytes(8, "big")]
            return bool(subscriber.ask.recv_multipart() == [b"", END, b""])

        assert eventually(ends)


def test_an_engine_that_is_gone_or_new_has_no_pages(tmp_path: Path) -> None:
    with publishing(tmp_path) as (publisher, subscriber, pool):
        publisher.send(pool)
        publish(pool, 1)
        publisher.send(pool)
        publisher.send(None)
        newer = PagePool(3)
        publisher.send(newer)
        told = publish(newer, 2)
        publisher.send(newer)
        index = KvIndex()
        assert eventually(lambda: len(subscriber.replay(0)) == 5)
        found = subscriber.replay(0)
        for _, payload in found[:3]:
            index.apply(payload)
        assert index.pages == set()
        for _, payload in found[3:]:
            index.apply(payload)
        assert (index.pages, index.clears) == ({told}, 3)


def test_a_router_may_listen_and_engines_connect() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.SUB)
    router.setsockopt(zmq.SUBSCRIBE, b"")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    publisher, pool = KvPublisher(KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}")), PagePool(3)
    publisher.send(pool)
    for number in count():
        publish(pool, number)
        publisher.send(pool)
        if router.poll(5):
            break
    assert len(router.recv_multipart()) == 3
    publisher.close()
    context.destroy(linger=0)


def test_a_full_queue_loses_nothing(tmp_path: Path) -> None:
    with publishing(tmp_path, max_queue_size=1) as (publisher, subscriber, pool):
        publisher.send(pool)
        for number in range(200):
            publish(pool, number)
            publisher.send(pool)

        def arrived() -> bool:
            publisher.send(pool)
            return subscriber.index().pages == {true_hash((number,) * 16, "") for number in (197, 198, 199)}

        assert eventually(arrived)


def test_a_place_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port} cannot be used: .*; choose another"):
            KvPublisher(KvEventsConfig(endpoint=f"tcp://*:{port}"))


# Options -----------------------------------------------------------------------------------------

VLLM = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}


def test_vllms_json_and_an_endpoint_are_read() -> None:
    whole = VLLM | {"replay_endpoint": "tcp://*:5558", "topic": "kv", "buffer_steps": 10, "hwm": 20}
    found = events_config(msgspec.json.encode(whole | {"max_queue_size": 30}).decode())
    assert found == KvEventsConfig(
        endpoint="tcp://*:5557",
        replay_endpoint="tcp://*:5558",
        topic="kv",
        buffer_steps=10,
        hwm=20,
        max_queue_size=30,
    )
    assert events_config("tcp://*:5557") == events_config(VLLM) == KvEventsConfig(endpoint="tcp://*:5557")
    for off in ({}, VLLM | {"publisher": "null"}, VLLM | {"enable_kv_cache_events": False}):
        assert events_config(off) is None
    config = config_of("default", {"kv_events_config": VLLM})
    assert config.kv_events == KvEventsConfig(endpoint="tcp://*:5557")
    load = decode_to_engine(encode(Load(config)))
    assert isinstance(load, Load)
    assert load.config == config


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("5557", "'5557' is no place for events: tcp://\\*:PORT listens"),
        ("tcp://*:0", "no place for events"),
        ("tcp://*:65536", "no place for events"),
        ("inproc://events", "no place for events"),
        ("{", "is no JSON"),
        ([], "must be a JSON object or an endpoint"),
        ({"enable_kv_cache_events": True}, "needs an endpoint, as whoever reaches it reads"),
        (VLLM | {"enable_kv_cache_events": 1}, "enable_kv_cache_events is true or false"),
        (VLLM | {"publisher": "kafka"}, "publisher is zmq or null, not 'kafka'"),
        (VLLM | {"endpiont": ""}, "no key 'endpiont'.*endpoint"),
        (VLLM | {"rank": 1}, "no key 'rank'"),
        (VLLM | {"hwm": 0}, "hwm is a whole number from 1 to"),
        (VLLM | {"buffer_steps": 1 << 40}, "buffer_steps is a whole number from 1 to 1048576"),
        (VLLM | {"max_queue_size": True}, "max_queue_size is a whole number"),
        (VLLM | {"topic": "t" * 300}, "topic is a text of at most 256"),
        (VLLM | {"event_form": "list"}, "event_form is map .* or array"),
        (VLLM | {"replay_endpoint": "tcp://router:5558"}, "replay_endpoint is where we listen"),
        (VLLM | {"replay_endpoint": "tcp://*:5557"}, "must differ"),
    ],
)
def test_bad_options_are_refused_with_advice(given: str | dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        events_config(given)


def test_who_listens_is_as_with_vllm() -> None:
    ours = ["tcp://*:5557", "tcp://[::1]:5557", "ipc:///run/events"]
    assert [binds(place) for place in [*ours, "tcp://router:5557", "tcp://127.0.0.1:5557"]] == [True] * 3 + [
        False
    ] * 2


def test_events_need_a_prefix_cache_and_a_process() -> None:
    events = KvEventsConfig(endpoint="tcp://*:5557")
    with pytest.raises(ConfigError, match="leave out --no-prefix-cache"):
        EngineConfig(kv_events=events, prefix_cache=False)
    with pytest.raises(ConfigError, match="use AsyncLLM or paceline serve"):
        LLM.of(EngineConfig(kv_events=events))


def test_each_replica_has_ports_of_its_own() -> None:
    events = events_config(VLLM | {"replay_endpoint": "tcp://*:5657"})
    found = [config.kv_events for config in replica_configs(EngineConfig(kv_events=events), 3)]
    assert [e and (e.endpoint, e.replay_endpoint, e.rank) for e in found] == [
        (f"tcp://*:{5557 + rank}", f"tcp://*:{5657 + rank}", rank) for rank in range(3)
    ]
    assert {config.kv_events for config in replica_configs(EngineConfig(), 3)} == {None}
    on_disk = KvEventsConfig(endpoint="ipc:///run/events").for_replicas(2)
    assert [config.endpoint for config in on_disk] == ["ipc:///run/events", "ipc:///run/events_dp1"]
    near = events_config(VLLM | {"replay_endpoint": "tcp://*:5558"})
    with pytest.raises(ConfigError, match="must be at least 2 ports apart for --replicas 2"):
        replica_configs(EngineConfig(kv_events=near), 2)
    with pytest.raises(ConfigError, match="no place for events"):
        replica_configs(EngineConfig(kv_events=events_config("tcp://*:65535")), 2)


# The real server ---------------------------------------------------------------------------------


def test_a_router_foretells_the_hits_of_two_replicas(model: Path, tmp_path: Path) -> None:
    """Sent to the replica that holds a prompt, it has as many cached tokens as its index says."""
    places = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    flag = msgspec.json.encode({"enable_kv_cache_events": True} | places).decode()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    prompts = [tuple(32 + (i * 7 + salt) % 50 for i in range(100)) for salt in (0, 1)]
    try:
        with (
            running(model, "--replicas", "2", "--route", "prefix", "--kv-events-config", flag) as server,
            server.client() as http,
        ):
            routers = [
                Subscriber(context, places["endpoint"] + end, places["replay_endpoint"] + end, b"")
                for end in ("", "_dp1")
            ]

            def hits(prompt: tuple[int, ...]) -> int:
                body = {"prompt": list(prompt), "max_tokens": 2, "temperature": 0}
                usage = http.post("/v1/completions", json=body).raise_for_status().json()["usage"]
                return int(usage["prompt_tokens_details"]["cached_tokens"])

            def foretold(prompt: tuple[int, ...]) -> int:
                return max(router.index().cached_len(prompt) for router in routers)

            assert eventually(
                lambda: {state["state"] for state in http.get("/v1/fleet").json()["replicas"]} == {"up"}
            )
            assert [foretold(prompt) for prompt in prompts] == [hits(prompt) for prompt in prompts] == [0, 0]
            assert eventually(lambda: [foretold(prompt) for prompt in prompts] == [96, 96])  # sent behind answers
            assert [router.index().rank for router in routers] == [0, 1]
            for prompt in (prompts[0][:50], prompts[1][:70]):
                expected = foretold((*prompt, 90, 91))
                assert expected == len(prompt) // 16 * 16
                assert hits((*prompt, 90, 91)) == expected
    finally:
        context.destroy(linger=0)
