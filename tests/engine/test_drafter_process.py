"""Drafters in processes of their own: the same drafts as beside the target, and no request notices a death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from threading import Event
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core import system
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.params import (
    MAX_BIASED,
    MAX_GRAMMAR_CHARS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    Grammar,
    SamplingParams,
)
from paceline.core.request_nouns import Request
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.placement import PlacedDrafter
from paceline.engine.overlapped_loop import OverlappedLoop
from paceline.engine.remote import protocol, remote_drafter
from paceline.engine.remote.protocol import BeginDrafter, Channel, ChannelClosed, open_channel
from paceline.engine.remote.remote_drafter import MAX_FAILURES, RemoteDrafter
from paceline.engine.remote.supervisor import DrafterProcess
from paceline.engine.request_table import Limits
from paceline.engine.wire import Submit, encode
from paceline.model.files import hf
from paceline.model.weights import canonical_names
from tests.core.test_system import stop
from tests.engine.same_text import DRAFTER_NOISE, SHARP, STAIRCASE, VOCAB, assert_same, run
from tests.engine.test_faults import spoil
from tests.engine.test_overlapped_loop import serve
from tests.engine.test_placement import CORES, two_cores
from tests.model.test_safetensors import config_json
from tests.tiny import tiny_config, tiny_raw_tokenizer, tiny_weights

if TYPE_CHECKING:
    from paceline.core.request_nouns import Outcome
    from paceline.engine.engine import Engine

pytestmark = two_cores

NAME = "draft-model"
CONFIG = tiny_config(vocab_size=VOCAB, num_layers=3, eos_ids=(VOCAB - 1,))
LIMITS = Limits(num_rows=4, max_len=128, prefill_tokens=24)
FEW_PAGES = 12
PATIENCE_S = 120.0


def write_model(weights: dict[str, torch.Tensor]) -> str:
    folder = Path(mkdtemp(prefix="paceline-test-"))
    names = canonical_names(CONFIG, hf.MODEL_NAMES, hf.LAYER_NAMES, hf.LAYER_PREFIX)
    save_file({names[n]: w.float().contiguous() for n, w in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(CONFIG, eos_token_id=VOCAB - 1)))
    (folder / "tokenizer.json").write_text(tiny_raw_tokenizer(VOCAB).to_str())
    return str(folder)


@cache
def models() -> tuple[str, str]:
    """Return the folders of a target and of a drafter that is often right."""
    weights, other = (tiny_weights(CONFIG, seed=s, embed_scale=SHARP) for s in (4, 5))
    return write_model(weights), write_model({n: w + DRAFTER_NOISE * other[n] for n, w in weights.items()})


def config(draft: str | None = None, **changes: Any) -> EngineConfig:
    target, drafter = models()
    where = {} if draft == "off" else {"draft_device": f"cpu:{CORES[-1]}"}
    draft = draft or f"{NAME}:model={drafter},k=4"
    values = {"threads": 1, "limits": LIMITS, "kv_tokens": FEW_PAGES * 16, "overlap": "off"} | where | changes
    return EngineConfig(model=target, draft=draft, **values)


@cache
def loaded() -> build.Loaded:
    return build.load(config("off"))


def engine_of(asked: EngineConfig, *, thread: bool = False) -> Engine:
    load = partial(build._load_drafter, asked) if thread else None
    return build.assemble(asked, loaded(), load).engine


def drafter_of(engine: Engine) -> RemoteDrafter:
    drafter = engine.drafting.drafters[NAME]
    assert isinstance(drafter, RemoteDrafter)
    return drafter


def requests(number: int, count: int = 10) -> list[Request]:
    """Requests of all kinds that choose tokens differently, some with a common beginning."""
    random, made = Random(number), []
    for i in range(count):
        penalised = i % 4 == 1
        params = SamplingParams(
            temperature=[0.0, 0.7, 1.0][i % 3],
            top_p=[1.0, 0.9][i % 2],
            repetition_penalty=1.2 if penalised else 1.0,
            frequency_penalty=0.3 if penalised else 0.0,
            logit_bias={40: 3.0} if i % 5 == 2 else {},
            min_tokens=3 if i % 4 == 2 else 0,
            max_tokens=random.randint(2, 50),
            stop=("never written",),
        )
        stem = tuple(range(40, 73)) if i % 2 else ()
        prompt = stem + tuple(random.randint(32, 60) for _ in range(random.randint(1, 20)))
        made.append(Request(f"{number}.{i}", prompt, params, seed=random.getrandbits(40), salt="any"))
    return made


def plain(asked: list[Request]) -> dict[str, Any]:
    return run(engine_of(config("off")), asked)


def until(holds: Any) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.01)


def back(drafter: RemoteDrafter) -> None:
    until(lambda: drafter.supervisor.running() is not None)


def kill(drafter: RemoteDrafter, number: int = signal.SIGKILL) -> None:
    pid = drafter.supervisor.pid
    assert pid is not None
    os.kill(pid, number)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(system, "MAX_WAIT_S", 0.01)


@pytest.mark.parametrize("options", ["", ",vocabulary=strings", ",tokens=310,weights=int8"])
def test_a_drafter_apart_drafts_what_it_would_beside_the_target(options: str) -> None:
    asked = config(f"{NAME}:model={models()[1]},k=4{options}")
    apart, beside = engine_of(asked), engine_of(asked, thread=True)
    assert isinstance(drafter_of(apart), RemoteDrafter)
    kill(drafter_of(apart), signal.SIGHUP)  # of the process group: it is the server's to answer
    assert isinstance(beside.drafting.drafters[NAME], PlacedDrafter)
    for number in (1, 2):  # the second finds pages of the first
        work = requests(number, 7)
        expected = plain(work)
        assert_same(expected, run(apart, work))
        assert_same(expected, run(beside, work))
    ours, theirs = apart.stats(), beside.stats()
    assert ours.drafters == theirs.drafters
    assert ours.k_histogram == theirs.k_histogram
    assert ours.preemptions == theirs.preemptions > 0
    assert ours.cached_tokens == theirs.cached_tokens > 0
    assert ours.drafters[NAME].accepted > 0
    assert ours.drafter_failures == 0
    for store in drafter_of(apart).needs.stores:
        assert apart.scheduler.pool._valid[store] == beside.scheduler.pool._valid[store]


def deadly(engine: Engine, random: Random) -> list[int]:
    """Let the drafter's process be killed or stopped at random before a step; return by which signals it was."""
    drafter, step, sent = drafter_of(engine), engine.step, list[int]()

    def stepping() -> list[Outcome]:
        if drafter.supervisor.running() is None:
            if random.random() < 0.3:
                back(drafter)
        elif random.random() < 0.06 and len(sent) < 4:
            sent.append(signal.SIGSTOP if len(sent) == 1 else signal.SIGKILL)
            kill(drafter, sent[-1])
        return step()

    engine.step = stepping  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize("turns", [False, True])
def test_no_request_notices_that_drafters_are_killed(turns: bool) -> None:
    engine, random = engine_of(config(overlap="on" if turns else "off")), Random(7 + turns)
    assert isinstance(engine.loop, OverlappedLoop) == turns
    drafter_of(engine)._deadline_s = 1.0
    sent = deadly(engine, random)
    for number in range(3):
        work = requests(number)
        expected = plain(work)
        got, cancelled = serve(engine, work, random)
        for name in cancelled:
            begun, whole = got.pop(name), expected.pop(name)
            assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
        assert_same(expected, got)
    assert signal.SIGSTOP in sent
    assert sent.count(signal.SIGKILL) > 1
    assert engine.stats().drafter_failures >= len(sent) - 1, "the last may not have been noticed"
    assert engine.stats().drafters[NAME].accepted > 0


def step_until_a_page_is_full(engine: Engine) -> None:
    """Step until a page is full: only then it is noted what a store holds of a row."""
    for _ in range(20):
        if not any(engine.scheduler.pool._valid[NAME]):
            engine.step()
            engine.check()


def test_requests_that_lived_on_are_drafted_for_again_and_nothing_is_taken_for_known() -> None:
    engine = engine_of(config(kv_tokens=64 * 16))
    drafter, pool = drafter_of(engine), engine.scheduler.pool
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    work = [Request(str(i), tuple(range(40, 60 + i)), params, seed=i) for i in range(3)]
    for request in work:
        engine.add(request)
    step_until_a_page_is_full(engine)
    assert any(pool._valid[NAME])
    kill(drafter)
    while drafter.supervisor.pid is not None:
        engine.step()
    assert not any(pool._valid[NAME])
    failures, before = engine.stats().drafter_failures, engine.stats().drafters[NAME].accepted
    assert failures == 1
    back(drafter)
    step_until_a_page_is_full(engine)
    assert engine.stats().drafters[NAME].accepted > before
    assert any(pool._valid[NAME])
    assert len(engine.scheduler.running) == 3
    assert engine.stats().drafter_failures == failures


def test_a_target_without_numbers_for_one_request_does_not_end_the_process() -> None:
    engine = engine_of(config(kv_tokens=64 * 16))
    drafter = drafter_of(engine)
    spoil(engine, "bad", least=30)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    asked = [
        Request("bad", tuple(range(40, 60)), params, seed=1),
        Request("good", tuple(range(50, 75)), params, seed=1),
    ]
    pid = drafter.supervisor.pid
    answers = run(engine, asked)
    assert (answers["bad"].ending[0], answers["good"].ending[0]) == ("error", "length")
    assert (drafter.supervisor.pid, engine.stats().drafter_failures) == (pid, 0)


def test_every_request_fits_into_its_share_of_a_message() -> None:
    params = SamplingParams(
        logit_bias={MAX_TOKEN_ID - i: -1.0 / 3 for i in range(MAX_BIASED)},
        stop=("x" * MAX_STOP_CHARS,) * MAX_STOPS,
        stop_token_ids=(MAX_TOKEN_ID,) * MAX_STOPS,
        grammar=Grammar.lark("start: " + "x" * (MAX_GRAMMAR_CHARS - 7)),
    )
    request = Request("a", (1,), params, seed=MAX_SEED, salt="s" * 64)
    assert len(encode(Submit.of(request))) > protocol._MAX_PARAMS_BYTES
    assert len(encode(Submit.of(remote_drafter._anonymous(request)))) <= protocol._MAX_PARAMS_BYTES


def test_a_drafter_that_does_not_come_back_is_counted_where_it_was_to_draft() -> None:
    engine = engine_of(config(kv_tokens=64 * 16), thread=True)
    (drafter,) = engine.drafting.drafters.values()
    assert isinstance(drafter, PlacedDrafter)
    drafter._deadline_s = 0.05
    come_back = Event()
    drafter._drafter.propose = lambda batch, plan: come_back.wait(PATIENCE_S)  # type: ignore
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    run(engine, [Request("a", tuple(range(40, 60)), params, seed=1)])
    come_back.set()
    assert 0 < engine.stats().drafter_failures <= engine.stats().steps


def test_one_of_several_drafters_and_once_unloaded_it_ends() -> None:
    engine = engine_of(config(f"auto:suffix+{NAME}:model={models()[1]}", profile=STAIRCASE))
    work = requests(1)
    assert_same(plain(work), run(engine, work))
    process = drafter_of(engine).supervisor._process._process  # type: ignore[union-attr]
    engine.unload(NAME)
    until(lambda: process.poll() is not None)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_drafter_s_process_ends_when_the_engine_s_is_killed(stopped: bool) -> None:
    code = (
        "import sys, time, msgspec; from paceline.engine.remote.supervisor import DrafterProcess\n"
        "from paceline.engine.remote.protocol import BeginDrafter\n"
        "process = DrafterProcess(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=BeginDrafter))\n"
        "print(process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        parent.stdin.write(encode(BeginDrafter(config(), 0, FEW_PAGES)))
        parent.stdin.close()
        pid = int(parent.stdout.readline())
        if stopped:
            stop(psutil.Process(pid))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    until(lambda: _is_gone(pid))


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"  # nobody has asked for its end yet


@pytest.mark.parametrize(
    "failing", ["subprocess.Popen", "socket.socketpair", "paceline.engine.remote.protocol.mmap"]
)
def test_nothing_is_left_of_a_process_that_could_not_be_started(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise OSError("too many open files")

    begin = BeginDrafter(config(), 0, FEW_PAGES)
    before = sorted(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(failing, refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="too many"):
            DrafterProcess(begin)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_what_is_wrong_with_a_drafter_is_said_at_the_start() -> None:
    with pytest.raises(ConfigError, match="layers must be between 1 and 3"):
        engine_of(config(f"{NAME}:model={models()[1]},layers=9"))


def test_what_reads_more_than_tokens_stays_in_the_engine_s_process() -> None:
    for law in ("rejection", "block"):
        engine = engine_of(config(law=law))
        assert isinstance(engine.drafting.drafters[NAME], PlacedDrafter)


def cut_model() -> str:
    """A draft model over its target's tables, as the shipped one."""
    return cut_folder(models()[0])


def cut_folder(target: str) -> str:
    folder = Path(mkdtemp(prefix="paceline-test-"))
    values = config_json(CONFIG, eos_token_id=VOCAB - 1) | {"shares": ["embed", "head"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(values))
    found = load_file(Path(target) / "model.safetensors")
    kept = {n: w for n, w in found.items() if n.startswith("model.layers.0.") or n == "model.norm.weight"}
    save_file(kept | {"d2t": torch.zeros(VOCAB, dtype=torch.int64)}, folder / "model.safetensors")
    return str(folder)


IN_PROCESS = {
    "ngram": "ngram:k=4",
    "suffix": "suffix:k=4,shared=4096",
    "draft-model": f"{NAME}:model=WHOLE,k=4",
    "cut": f"{NAME}:model=CUT,k=4",
}


@pytest.mark.parametrize("kind", IN_PROCESS)
def test_every_kind_that_reads_tokens_can_have_a_process_of_its_own(kind: str) -> None:
    spec = IN_PROCESS[kind].replace("WHOLE", models()[1]).replace("CUT", cut_model() if kind == "cut" else "")
    asked = requests(3)
    expected = plain(asked)
    engine = engine_of(config(spec, draft_device="same", draft_process=True, kv_tokens=64 * 16))
    (drafter,) = engine.drafting.drafters.values()
    assert isinstance(drafter, RemoteDrafter)
    assert_same(expected, run(engine, asked))
    assert engine.stats().drafter_failures == 0
    assert sum(counts.accepted for counts in engine.stats().drafters.values()) > 0
    pid = drafter.supervisor.pid
    kill(drafter)
    assert_same(expected, run(engine, asked))
    until(lambda: drafter.supervisor.running() is not None)
    assert drafter.supervisor.pid != pid


@pytest.mark.parametrize(
    "spec",
    [
        "eagle3:model=any,k=4",
        "draft-model:layers=1,k=4",
        "auto:suffix+peagle:model=x",
        "block:model=x",
        "auto:grammar+suffix",
    ],
)
def test_what_reads_the_target_s_numbers_cannot_leave_and_is_told_who_can(spec: str) -> None:
    with pytest.raises(ConfigError, match="ngram, suffix and draft-model can"):
        engine_of(config(spec, draft_device="same", draft_process=True))
    with pytest.raises(ConfigError, match="--law coupled"):
        engine_of(config(draft_device="same", draft_process=True, law="rejection"))


def test_a_process_whose_drafter_goes_on_failing_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(config(kv_tokens=64 * 16))
    drafter = drafter_of(engine)
    pid, real, failures = drafter.supervisor.pid, DrafterProcess.ask, []

    def fails(self: DrafterProcess, message: Any, *arguments: Any) -> Any:
        if self.pid == pid:
            failures.append(message)
            raise PacelineError("it is out of order")
        return real(self, message, *arguments)

    monkeypatch.setattr(DrafterProcess, "ask", fails)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    asked = [Request("a", tuple(range(40, 60)), params, seed=1)]
    expected = plain(asked)
    assert_same(expected, run(engine, asked))
    assert len(failures) == MAX_FAILURES
    back(drafter)
    assert drafter.supervisor.pid != pid
    assert_same(expected, run(engine, asked))
    assert len(failures) == MAX_FAILURES


def test_a_channel_tells_when_the_other_end_is_gone_or_lies() -> None:
    ours, line, memory = open_channel(100)
    theirs = Channel(line, memory, first=False)
    ours.send(b"question")
    assert theirs.receive() == b"question"
    theirs.send(b"x" * 100)
    assert ours.receive(1.0) == b"x" * 100
    with pytest.raises(ValueError, match="more than the 100"):
        ours.send(b"x" * 101)
    with pytest.raises(TimeoutError):
        ours.receive(0.001)
    theirs.send(b"")
    theirs._memory[theirs._out : theirs._out + 8] = (101).to_bytes(8, "little")
    with pytest.raises(ChannelClosed, match="101 bytes"):
        ours.receive(1.0)
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive(1.0)
    with pytest.raises(ChannelClosed):
        ours.send(b"")
    ours.close()
    os.close(memory)
