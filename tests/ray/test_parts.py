"""Parts of `paceline.ray` that need no cluster: lines, the scaling policy, arguments, where ray is imported."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import pytest

from paceline.cli import main
from paceline.core.errors import BadModelFile, ConfigError, EngineDied, LineBroke, PacelineError
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Outcome, Request
from paceline.core.weight_source import TAGS, WeightSource
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.wire import Submit, encode
from paceline.ray import pieces, serve_command
from paceline.ray.engine_host import EngineHost
from paceline.ray.front_options import of_arguments
from paceline.ray.line import Down, EngineUp, FromHost, FrontLine, read_from_host, read_to_host, split
from paceline.ray.local_ray import ray_folder
from paceline.ray.pieces import ENDED, SECRET_BYTES, connect
from paceline.ray.scaling_policy import Headroom
from paceline.serve.api.keys import new_key
from paceline.serve.engines import Answers, Event, OnEvent
from paceline.serve.fleet.engine_fleet import EngineFleet
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.worker.commands import EngineState, GoOn, Obeyed, Pause, UpdateWeights
from paceline.serve.worker.messages import Cancel, OutcomeBatch, Ready, Rejected, Watch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

ROOT = Path(__file__).parents[2]
FRONT = "0123456789abcdef"  # name of a front
T = TypeVar("T")


def outcome(name: str, *token_ids: int) -> Outcome:
    return Outcome(name, token_ids, "")


def test_all_outcomes_of_a_step_are_one_message_in_order() -> None:
    async def work() -> list[Any]:
        line = FrontLine()
        line.put_outcome(outcome("a", 1))
        line.put_outcome(outcome("b", 2))
        line.put(Rejected("c", "RequestError", "no"))
        line.put_outcome(outcome("a", 3))
        found = read_from_host(await line.take(1.0))
        line.put(Down(hangs=False))
        return [found, read_from_host(await line.take(1.0)), await line.take(0.01)]

    first, second, nothing = run_with_lines(work())
    assert [type(message) for message in first] == [OutcomeBatch, Rejected, OutcomeBatch]
    assert [(o.request_id, o.token_ids) for o in first[0].outcomes] == [("a", (1,)), ("b", (2,))]
    assert second == [Down(hangs=False)]
    assert nothing == b""


def test_messages_to_an_engine_come_as_they_were_sent() -> None:
    sent = [Submit("a", (1, 2), {}, 3), Cancel("b", abort=True), Pause(), GoOn()]
    assert [read_to_host(data) for data in split(encode(sent))] == sent


@dataclass
class Context:
    """The part of Ray's autoscaling context that is read."""

    aggregated_metrics: dict[str, dict[str, float]]
    current_num_replicas: int
    current_time: float = 100.0
    policy_state: dict[str, Any] = field(default_factory=dict)
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4


def load(rows: float, replicas: int, step_s: float = 0.01) -> dict[str, dict[str, float]]:
    """Each replica has so many rows; a step takes `step_s` for each row."""
    names = [f"r{i}" for i in range(replicas)]
    found = {"open_rows": dict.fromkeys(names, rows), "prefill_s_per_token": dict.fromkeys(names, 1e-4)}
    return found | {f"step_s_{i}": dict.fromkeys(names, step_s * i) for i in range(1, 17)}


def test_a_fleet_grows_with_the_seconds_of_a_token_and_shrinks_with_headroom() -> None:
    policy = Headroom(tpot_ms=50.0)
    assert policy(Context(load(8, 1), 1))[0] == 2, "eight rows take 80 ms, four take 40"
    assert policy(Context(load(2, 2), 2))[0] == 2, "four rows on one replica would take 40 ms"
    assert policy(Context(load(1, 2), 2))[0] == 1
    assert policy(Context(load(4, 2), 2))[0] == 2
    assert policy(Context(load(16, 4), 4))[0] == 4, "the bound"


def test_replicas_that_have_told_nothing_are_waited_for() -> None:
    policy = Headroom()
    assert policy(Context({}, 2))[0] == 2
    assert policy(Context(load(1, 1), 3))[0] == 3
    assert policy(Context({}, 0))[0] == 1


def test_the_policy_remembers_half_a_minute() -> None:
    policy = Headroom(tpot_ms=50.0)
    _, state = policy(Context(load(8, 1), 1, 100.0))
    _, state = policy(Context(load(1, 1), 1, 120.0, state))
    assert len(state["snapshots"]) == 2
    _, state = policy(Context(load(1, 1), 1, 131.0, state))
    assert [at_s for at_s, _ in state["snapshots"]] == [120.0, 131.0]


class RunningAnswers:
    """Answers of a request that runs."""

    closed = False

    async def close(self) -> None:
        self.closed = True


async def a_host(client: Any = None) -> EngineHost:
    """An actor's host that takes lines on loopback; see `run_with_lines`."""
    host = EngineHost(EngineConfig())
    host._client = client
    await host._lines.listen("127.0.0.1")
    OPEN.append(host._lines._server)
    return host


async def line_to(host: EngineHost, front: str = FRONT, secret: bytes | None = None) -> pieces.Pieces:
    """A front's end of a new line; see `run_with_lines`."""
    address = await host.address()
    line = await connect(address if secret is None else address._replace(secret=secret), front)
    OPEN.append(line)
    return line


OPEN: list[Any] = []  # lines and their servers


def run_with_lines(work: Coroutine[Any, Any, T]) -> T:
    """Run, and close what was opened: sockets that collection finds disturb whatever runs then."""

    async def closing() -> T:
        try:
            return await work
        finally:
            for opened in OPEN:
                opened.close()
            OPEN.clear()
            await asyncio.sleep(0.05)

    return asyncio.run(closing())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_line_that_is_attached_again_leaves_no_answer_running() -> None:
    async def work() -> tuple[bool, bool]:
        host = await a_host()
        lost, other = RunningAnswers(), RunningAnswers()
        older = await line_to(host)
        await until(lambda: FRONT in host._lines.lines)
        host._open = {(FRONT, "a"): lost, ("other", "a"): other}  # type: ignore[dict-item]
        replaced = host._lines.lines[FRONT]
        newer = await line_to(host)
        await until(lambda: host._lines.lines.get(FRONT) not in (None, replaced))
        host._lines.lines[FRONT].put(Down(hangs=False))
        assert read_from_host(await newer.receive()) == [Down(hangs=False)]
        with pytest.raises(EOFError):
            await older.receive()
        newer.close()
        await until(lambda: not host._lines.lines)
        return lost.closed, other.closed

    assert run_with_lines(work()) == (True, False)


class SlowClient:
    """Client of an engine whose requests are sent once a test says so."""

    ready = None

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.began, self.goes_on = asyncio.Event(), asyncio.Event()

    async def submit(self, requests: list[Request], on_event: OnEvent) -> Answers:
        self.began.set()
        await self.goes_on.wait()
        return Answers(self, {requests[0].request_id: 0}, on_event)  # type: ignore[arg-type]

    async def cancel(self, answers: Answers) -> None:
        self.cancelled += answers.index
        answers.index.clear()


def test_a_request_of_an_older_line_does_not_run_for_a_newer_one() -> None:
    """The request is submitted while the front attaches again; the front has given it up."""

    async def work() -> tuple[list[str], dict[Any, Any]]:
        client = SlowClient()
        host = await a_host(client)
        older = await line_to(host)
        await until(lambda: FRONT in host._lines.lines)
        replaced = host._lines.lines[FRONT]
        older.send(encode([Submit("a", (1, 2), {}, 3), Submit("b", (1, 2), {}, 3)]))
        await client.began.wait()
        newer = await line_to(host)
        await until(lambda: host._lines.lines.get(FRONT) not in (None, replaced))
        client.goes_on.set()
        await until(lambda: client.cancelled)
        await asyncio.sleep(0.1)
        newer.close()
        return client.cancelled, host._open

    assert run_with_lines(work()) == (["a"], {})


def test_steps_are_noted_while_any_front_watches() -> None:
    async def work() -> list[bool]:
        host = EngineHost(EngineConfig())
        told: list[bool] = []

        async def watch(*, on: bool) -> None:
            told.append(on)

        host._client = SimpleNamespace(watch=watch)  # type: ignore[assignment]
        for front, on in (("a", True), ("b", True), ("a", False)):
            await host.take(front, Watch(on))
        await host.left("a")
        await host.left("b")
        return told

    assert run_with_lines(work()) == [True, True, True, False]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_that_is_cancelled_while_it_is_sent_does_not_run(leaves: bool) -> None:
    async def work() -> tuple[list[str], dict[Any, Any]]:
        client = SlowClient()
        host = await a_host(client)
        line = await line_to(host)
        line.send(encode([Submit("a", (1, 2), {}, 3)]))
        await client.began.wait()
        if leaves:
            line.close()
        else:
            line.send(encode([Cancel("a")]))
        client.goes_on.set()
        await until(lambda: client.cancelled)
        await until(lambda: not leaves or not host._lines.lines)
        line.close()
        return client.cancelled, host._open

    assert run_with_lines(work()) == (["a"], {})


def test_a_front_without_the_secret_gets_no_line(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> list[str]:
        host = await a_host()
        stranger = await line_to(host, FRONT[::-1], bytes(SECRET_BYTES))
        with pytest.raises(ENDED):
            async with asyncio.timeout(120):
                await stranger.receive()
        assert not host._lines.lines
        await line_to(host)
        await until(lambda: host._lines.lines)
        return list(host._lines.lines)

    assert run_with_lines(work()) == [FRONT]
    assert "does not know the secret" in caplog.text


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\x03\0\0\0abc"])
def test_a_piece_that_is_no_message_ends_its_line_alone(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> list[str]:
        host = await a_host()
        bad, good = [await line_to(host, name) for name in (FRONT, FRONT[::-1])]
        await until(lambda: len(host._lines.lines) == 2)
        bad._writer.write(sent)
        with pytest.raises(ENDED):
            await bad.receive()
        host._lines.put(Down(hangs=False))
        assert read_from_host(await good.receive()) == [Down(hangs=False)]
        return list(host._lines.lines)

    assert run_with_lines(work()) == [FRONT[::-1]]
    assert "a line to a front broke" in caplog.text


def test_a_request_out_of_bounds_is_refused_alone() -> None:
    async def work() -> list[Any]:
        host = await a_host(client := SlowClient())
        client.goes_on.set()
        line = await line_to(host)
        line.send(encode([Submit("bad", (1, 2), {}, -1), Submit("good", (1, 2), {}, 3)]))
        (refused,) = read_from_host(await line.receive())
        await until(lambda: host._open)
        return [refused, *host._open]

    refused, is_open = run_with_lines(work())
    assert (refused.request_id, refused.kind, is_open) == ("bad", "RequestError", (FRONT, "good"))
    assert "seed" in refused.message


def test_an_end_that_gives_no_sign_of_life_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        host = await a_host()
        silent, alive = await line_to(host), await line_to(host, FRONT[::-1])
        silent._beating.cancel()
        await until(lambda: len(host._lines.lines) == 2)
        await until(lambda: len(host._lines.lines) == 1)
        await asyncio.sleep(0.5)
        assert list(host._lines.lines) == [FRONT[::-1]]
        alive.close()

    monkeypatch.setattr(pieces, "BEAT_S", 0.05)
    monkeypatch.setattr(pieces, "SILENCE_S", 4.0)
    run_with_lines(work())


def test_lines_are_encrypted_where_ray_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 {kind} -days 2 -subj /CN=authority -keyout ca.key -out ca.pem",
        f"req {kind} -subj /CN=node -keyout node.key -out node.csr",
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out node.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    for name, value in {"CA_CERT": "ca.pem", "SERVER_CERT": "node.pem", "SERVER_KEY": "node.key"}.items():
        monkeypatch.setenv(f"RAY_TLS_{name}", str(tmp_path / value))
    monkeypatch.setenv("RAY_USE_TLS", "1")

    async def work() -> None:
        host = await a_host()
        line = await line_to(host)
        assert line._writer.get_extra_info("cipher") is not None
        await until(lambda: host._lines.lines)
        host._lines.put(Down(hangs=False))
        assert read_from_host(await line.receive()) == [Down(hangs=False)]
        line.close()
        host_name, port, _ = await host.address()
        anonymous = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        anonymous.check_hostname = False
        anonymous.verify_flags &= ~ssl.VERIFY_X509_STRICT
        reader, writer = await asyncio.open_connection(host_name, port, ssl=anonymous)
        OPEN.append(writer)
        with pytest.raises(ENDED):  # in TLS 1.3 the other end says so at the first reading
            await reader.readexactly(1)
        monkeypatch.delenv("RAY_USE_TLS")
        plain = await line_to(host, FRONT[::-1])
        with pytest.raises(ENDED):
            await plain.receive()

    run_with_lines(work())


def test_an_answer_may_end_while_those_before_it_are_cancelled() -> None:
    async def work() -> dict[Any, Any]:
        host = EngineHost(EngineConfig())

        class LastAnswers(RunningAnswers):
            async def close(self) -> None:
                host._open.pop(("front", "b"), None)

        host._open = {("front", "a"): LastAnswers(), ("front", "b"): RunningAnswers()}  # type: ignore[dict-item]
        await host.left("front")
        return host._open

    assert run_with_lines(work()) == {}


def test_neither_server_nor_engine_imports_ray() -> None:
    code = "import sys, paceline.cli, paceline.serve.server, paceline.ray.line; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


# paceline serve --on ray ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--cores", "0,1"], "--cores does not go with --on ray: Ray places engines"),
        (["--trace", "steps.jsonl"], "--trace does not go with --on ray"),
        (["--watchdog-seconds", "5"], "--watchdog-seconds does not go with --on ray: Ray replaces"),
        (["--rl", "--insecure"], "--api-key"),
        (["--hedge", "p95", "--law", "rejection"], "--hedge needs --law coupled"),
        ([], "--on ray needs Ray: pip install 'paceline[ray]'"),
    ],
)
def test_what_ray_cannot_do_is_refused_by_name(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "find_spec", lambda _: None)
    assert main(["serve", "--on", "ray", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "Ray could not be started: too slow"),
        ("none", "RAY_ADDRESS is none, where no cluster answers: too slow"),
    ],
)
def test_a_ray_that_is_not_there_is_told_in_a_line(
    address: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("too slow")

    ray = ModuleType("ray")
    ray.init, ray.shutdown = fails, lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(serve_command, "find_spec", lambda _: True)
    monkeypatch.setattr(serve_command, "start_local_ray", fails)
    assert main(["serve", "--on", "ray", "--port", "0"]) != 0
    assert says in capsys.readouterr().err


def test_what_was_not_deployed_is_not_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application may be another command's; without Ray Serve, removing it would hide our error."""
    called: list[str] = []

    def notes(name: str) -> Any:
        return lambda *_: called.append(name)

    def refused(*_: Any, **__: Any) -> None:
        raise ConfigError("they do not fit")

    ray = ModuleType("ray")
    ray.serve = SimpleNamespace(delete=notes("delete"), shutdown=notes("serve"))  # type: ignore[attr-defined]
    ray.shutdown = notes("ray")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(serve_command, "find_spec", lambda _: True)
    folders: list[Path] = []
    monkeypatch.setattr(serve_command, "start_local_ray", lambda _, folder, **__: folders.append(Path(folder)))
    monkeypatch.setattr(serve_command, "deploy", refused)
    fleets = SimpleNamespace(ray_fleet=lambda *_: EngineFleet(ReplicaOptions()))
    monkeypatch.setitem(sys.modules, "paceline.ray.ray_fleet", fleets)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["serve", "--on", "ray", "--port", "0"]) == 2
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "they do not fit" in capsys.readouterr().err
    assert called == ["serve", "ray"]
    (folder,) = folders
    assert not folder.exists()


OWNER = """
import subprocess, sys
from paceline.ray.local_ray import ray_folder
work = "import sys, time; file = open(sys.argv[1], 'w'); print(flush=True); time.sleep(600)"
with ray_folder() as folder:
    (folder / "session_1").mkdir()
    child = [sys.executable, "-c", work, f"{folder}/session_1/agent.log", "ray::Agent"]
    process = subprocess.Popen(child, stdout=subprocess.PIPE)
    process.stdout.readline()
    print(process.pid, folder, flush=True)
    sys.stdin.read()
    process.kill()
    process.wait()
"""


def test_what_a_dead_ray_left_goes_and_what_a_living_one_owns_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        owners = [
            subprocess.Popen(
                [sys.executable, "-c", OWNER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"TMPDIR": parent},
            )
            for _ in range(2)
        ]
        try:
            (dead, dead_folder), (lives, its_folder) = (one.stdout.readline().split() for one in owners)  # type: ignore[union-attr]
            owners[0].kill()
            owners[0].wait()
            with ray_folder() as own:
                assert own.is_dir()
                assert not Path(os.fsdecode(dead_folder)).exists()
                assert Path(os.fsdecode(its_folder)).is_dir()
                assert until_gone(int(dead))
                assert psutil.Process(int(lives)).status() != psutil.STATUS_ZOMBIE
        finally:
            for one in owners:
                one.communicate()
        assert list(Path(parent).iterdir()) == []


def until_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(120)
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("messages", "kind", "says"),
    [
        (["failed 3 times\n  File x\npaceline.core.errors.BadModelFile: a: b", "E: c"], BadModelFile, "a: b"),
        (["", "ray.exceptions.GetTimeoutError: late"], PacelineError, "late"),
        ([], EngineDied, "Deploying failed"),
    ],
)
def test_what_ended_an_engine_is_told_as_by_a_server(messages: list[str], kind: type, says: str) -> None:
    found = serve_command.reason_of(messages, "Deploying failed")
    assert (type(found), str(found)) == (kind, says)


def test_words_that_yaml_takes_for_others_are_taken() -> None:
    options = of_arguments({"insecure": True, "resume": False, "tail": False, "resume_wait_s": 1})
    assert (options.fleet.resume, options.fleet.tail, options.fleet.resume_wait_s) == ("off", "off", 1)


@pytest.mark.parametrize("wrong", [{"resume_wait_s": "1m"}, {"resume_wait_s": True}, {"tail": 5}, {"resume": 1}])
def test_values_of_another_type_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="|".join(wrong)):
        of_arguments({"insecure": True} | wrong)


@pytest.mark.ray
class TestArguments:
    """Arguments of `serve run paceline.ray:app`."""

    @pytest.fixture(autouse=True)
    def ray(self) -> None:
        pytest.importorskip("ray", reason="ray is not installed: pip install 'paceline[ray]'")

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            ({}, "api_key"),
            ({"insecure": "true", "rl": "true"}, "api_key"),
            ({"api_key": "k", "rl": "true", "fronts": "2"}, "fronts=1"),
            ({"insecure": "true", "replica": "2"}, "did you mean 'replicas'"),
            ({"insecure": "true", "autoscaling": "many"}, "1-4"),
            ({"insecure": "true", "autoscaling": "4-1"}, "1-4"),
            ({"insecure": "true", "replicas": "many"}, "replicas is a number from 1 to 256"),
            ({"insecure": "true", "cpus": "0"}, "cpus is a number above 0"),
            ({"insecure": "true", "autoscaling": "1-2", "tpot_ms": "soon"}, "tpot_ms is a number above 0"),
            ({"insecure": "true", "tpot_ms": "80"}, "goes with autoscaling"),
            ({"insecure": "true", "autoscaling": "1-2", "replicas": "2"}, "leave out replicas"),
            ({"insecure": "true", "hedge": "p95", "law": "rejection"}, "--hedge needs --law coupled"),
            ({"insecure": "true", "weights": "int3"}, "int3"),
            ({"insecure": "true", "kv_events_config": "tcp://127.0.0.1:5557"}, "does not go with Ray"),
        ],
    )
    def test_wrong_ones_are_refused(self, args: dict[str, str], says: str) -> None:
        from paceline.ray import app

        with pytest.raises(ConfigError, match=says):
            app(args)

    def test_those_of_the_example_for_kubernetes_are_taken(self, tmp_path: Path) -> None:
        import yaml

        from paceline.ray import app

        example = yaml.safe_load((ROOT / "examples" / "kuberay.yaml").read_text())
        (application,) = yaml.safe_load(example["spec"]["serveConfigV2"])["applications"]
        cluster = example["spec"]["rayClusterConfig"]
        (workers,) = cluster["workerGroupSpecs"]
        assert application["args"]["autoscaling"] == f"{workers['minReplicas']}-{workers['maxReplicas']}"
        assert cluster["enableInTreeAutoscaling"], "else workers are never added"
        assert application["import_path"] == "paceline.ray:app"
        keys = tmp_path / "keys"
        keys.write_text(new_key("one")[1].line + "\n")
        made = app(application["args"] | {"api_key_file": str(keys)})
        assert made._bound_deployment.name == "Front"

    def test_a_key_that_looks_like_a_number_is_that_key(self) -> None:
        from paceline.ray import app

        made = app({"api_key": "0012345", "served_model_name": "true"})
        options = made._bound_deployment.init_args[0]
        assert (options.api_key, options.served_names) == ("0012345", ("true",))

    def test_a_fraction_is_a_number(self) -> None:
        from paceline.ray import app

        with pytest.raises(ConfigError, match=r"--resume-wait .* not 86400\.5"):
            app({"insecure": "true", "resume_wait_s": "86400.5"})

    def test_a_front_has_as_many_open_answers_as_ray_lets_through(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from paceline.ray import front

        made: list[Any] = []

        def make(*given: Any, **_: Any) -> Any:
            made.append(given)
            return None, SimpleNamespace()

        async def scenario() -> None:
            fleet = SimpleNamespace(first_ready=asyncio.sleep(0))
            monkeypatch.setattr(front, "make_app", make)
            monkeypatch.setattr(front, "_served", [])
            monkeypatch.setattr(front, "ray_fleet", lambda *_: fleet)
            monkeypatch.setattr(front, "stay_on_loopback", lambda: None)
            monkeypatch.setattr(front.serve, "get_replica_context", lambda: SimpleNamespace(app_name="a"))
            replica = object.__new__(front.FrontReplica)
            await front.FrontReplica.__init__(replica, of_arguments({"insecure": True}), None)

        asyncio.run(scenario())
        assert made[0][3] == front.MAX_CALLS > 1024

    def test_they_make_two_deployments(self) -> None:
        from paceline.ray import app

        made = app({"insecure": "true", "autoscaling": "1-3", "tpot_ms": "80", "fronts": "2", "max_len": "512"})
        assert made._bound_deployment.name == "Front"
        assert made._bound_deployment.num_replicas == 2


@pytest.mark.ray
def test_a_line_that_breaks_is_no_restart() -> None:
    """A front that is attached again hears of the same process; only the actor knows whether it is another.

    So its open answers are told of the line, unless the actor says that the process has ended.
    """
    pytest.importorskip("ray", reason="ray is not installed: pip install 'paceline[ray]'")
    from paceline.ray.host_engines import HostEngines

    ready = Ready("tiny", 256, 320, b"{}", (319,), None, None, ())
    up, newer = EngineUp(ready, 2), EngineUp(ready, 3, "v5", state := EngineState(paused=True))
    states = iter([[up], [up], [up, Down(hangs=False), newer]])

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for message in next(states, ()):
            write(writer, encode([message]))
            await told_again(message)
        writer.close()

    async def told_again(message: FromHost) -> None:
        """Wait until the front has heard a message; if it is of an engine, it sends it a request."""
        seen = len(told)
        await until(lambda: (engines.ready is not None) == isinstance(message, EngineUp))
        if isinstance(message, EngineUp):
            await engines.submit([Request(f"r{seen}", (1,), SamplingParams(max_tokens=2), 0)], told.append)
            found.append(engines.restarts)

    async def work() -> None:
        nonlocal engines
        engines = HostEngines(await host_of(serve), FRONT)
        await until(lambda: len(told) == 4)
        await engines.stop()

    found: list[int] = []
    told: list[Event] = []
    engines: Any = None
    run_with_lines(work())
    assert found == [0, 0, 0, 1]
    assert (engines.commands.version, engines.commands.state) == ("v5", state)
    assert [type(event) for event in told] == [LineBroke, LineBroke, EngineDied, LineBroke]


def write(writer: asyncio.StreamWriter, piece: bytes) -> None:
    writer.write(len(piece).to_bytes(4, "little") + piece)


async def host_of(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> Any:
    """Handle of an actor whose lines are served by `serve`."""

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(EngineDied, TimeoutError):  # the test is over
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0)
    OPEN.append(server)

    async def address() -> tuple[str, int, bytes]:
        return "127.0.0.1", server.sockets[0].getsockname()[1], bytes(SECRET_BYTES)

    return SimpleNamespace(address=SimpleNamespace(remote=address))


@pytest.mark.ray
def test_weights_renewed_while_the_line_was_down_are_told() -> None:
    """Answers that wait have the key of the weights before, which no replica has any more."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'paceline[ray]'")
    from paceline.ray.host_engines import HostEngines

    before, newer = (Ready("tiny", 256, 320, b"{}", (319,), None, None, (), promise=key) for key in ("old", "new"))
    states = iter([EngineUp(before, 0), EngineUp(newer, 0), EngineUp(newer, 0)])

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (message := next(states, None)) is not None:
            write(writer, encode([message]))
            await until(lambda: engines.ready is not None and engines.ready.promise == message.ready.promise)
        else:
            over.append(None)

    async def work() -> None:
        nonlocal engines
        engines = HostEngines(await host_of(serve), FRONT)
        engines.on_renewed = renewed.append
        await until(lambda: over)
        await engines.stop()

    renewed: list[str] = []
    over: list[None] = []
    engines: Any = None
    run_with_lines(work())
    assert renewed == ["old"]


@pytest.mark.ray
def test_a_line_that_breaks_at_once_each_time_is_a_failed_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the line is attached later; from the fourth break on, its process gets no answers again."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'paceline[ray]'")
    from paceline.ray import host_line
    from paceline.ray.host_engines import HostEngines

    ready = Ready("tiny", 256, 320, b"{}", (319,), None, None, ())

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        write(writer, encode([EngineUp(ready, 0)]))
        await until(lambda: engines.ready is not None)
        await engines.submit([Request(f"r{len(told)}", (1,), SamplingParams(max_tokens=2), 0)], told.append)
        write(writer, b"these bytes are no messages")

    async def work() -> None:
        nonlocal engines
        engines = HostEngines(await host_of(serve), FRONT)
        await until(lambda: len(told) >= 5)
        await engines.stop()

    told: list[Event] = []
    engines: Any = None
    pauses = [host_line.again_s(breaks) for breaks in (1, 2, 3, 9, 5000)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 25.6, 25.6])
    monkeypatch.setattr(host_line, "AGAIN_S", 1e-4)
    run_with_lines(work())
    assert [type(event) for event in told[:5]] == [LineBroke, LineBroke, LineBroke, EngineDied, EngineDied]


def test_a_front_is_told_of_each_process_once() -> None:
    ready = Ready("tiny", 256, 320, b"{}", (319,), None, None, ())
    state = EngineState(UpdateWeights(WeightSource("newer"), "v5"), paused=True, released=TAGS)

    async def work() -> list[Any]:
        host, line = EngineHost(EngineConfig()), FrontLine()
        states = (
            (ready, 1, 7),
            (ready, 1, 7),
            (None, 1, 7),
            (ready, 1, 7),
            (None, 1, None),
            (ready, 2, 8),
            (None, 3, 9),
        )
        commands = SimpleNamespace(version="v5", state=state)
        for now_ready, restarts, pid in (*states, (None, 3, 9)):
            now = SimpleNamespace(ready=now_ready, restarts=restarts, pid=pid, commands=commands)
            host._client = now  # type: ignore[assignment]
            host.tell_state(line)
        return read_from_host(await line.take(1.0))  # type: ignore[no-any-return]

    up, hangs, ended = EngineUp(ready, 1, "v5", state), Down(hangs=True), Down(hangs=False)
    assert run_with_lines(work()) == [up, hangs, up, ended, EngineUp(ready, 2, "v5", state), ended]


@pytest.mark.ray
def test_a_replica_obeys_until_its_last_command_is_answered() -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'paceline[ray]'")
    from paceline.ray.host_engines import HostCommands

    async def work() -> list[bool]:
        gates = [asyncio.Event(), asyncio.Event()]
        waiting = iter(gates)

        async def command(_: bytes) -> bytes:
            await next(waiting).wait()
            return encode(Obeyed("v1"))

        line: Any = SimpleNamespace(send=list)
        commands = HostCommands(SimpleNamespace(command=SimpleNamespace(remote=command)), line, list)
        sent = [asyncio.create_task(commands.send(Pause())) for _ in gates]
        seen = []
        for gate, task in zip(gates, sent, strict=True):
            await asyncio.sleep(0)
            seen.append(commands.obeying)
            gate.set()
            await task
        return [*seen, commands.obeying]

    assert run_with_lines(work()) == [True, True, False]
