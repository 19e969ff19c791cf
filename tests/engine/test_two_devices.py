"""A drafter on a device of its own, beside a target whose rows are on its device; both are pretended.

It sees the host's rows, so its rows wait for their outcomes in the late loop, or two groups of them alternate.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from paceline.backend.cuda.decoder import CudaDecoder
from paceline.backend.cuda.late_program import Program
from paceline.backend.device import Device
from paceline.backend.registry import BACKENDS
from paceline.core import system
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.draft import late
from paceline.draft.late import LateDrafter
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.placement import PlacedDrafter, Placement
from paceline.engine.late_loop import LateLoop
from paceline.engine.overlapped_loop import OverlappedLoop
from paceline.engine.remote.remote_drafter import RemoteDrafter
from paceline.model.heads.config import read_config
from tests.draft.heads import CORRECTED, drafter_of, head_values, random_weights, trained_head, write_head
from tests.engine import test_drafter_process as processes
from tests.engine.same_text import (
    PLAIN,
    RestlessK,
    Settings,
    Tally,
    assert_same,
    make_engine,
    plain_answers,
    run,
    settings_,
    target,
    workloads,
)
from tests.engine.test_drafter_process import LIMITS, NAME, deadly
from tests.engine.test_drafter_process import drafter_of as process_of
from tests.engine.test_overlapped_loop import serve, unreliable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.engine.engine import Engine

CUDA, ELSEWHERE = "cuda", "cpu"
OWN_MODEL = "draft-model:model=noisy"
LOOPS = {"off": LateLoop, "on": OverlappedLoop}
FEW = 4  # workloads; the nightly run has more


def apart(draft: str, changed: Settings, overlap: str = "on") -> Engine:
    return make_engine(draft, changed, types=CUDA, draft_device=ELSEWHERE, overlap=overlap)


@cache
def random_head(kind: str) -> str:
    """An untrained head: hardly ever right, and made at once."""
    config = target().decoder.config
    values, folder = head_values(kind, config), Path(mkdtemp(prefix="paceline-test-"))
    write_head(folder, values, config, random_weights(read_config(values, config)))
    return f"{drafter_of(kind)}:model={folder}"


def head_of(kind: str) -> str:
    return f"{drafter_of(kind)}:model={trained_head(kind, target().decoder)}"  # type: ignore[arg-type]


def compare(draft: str, overlap: str, examples: int) -> Tally:
    """Compare answers with those of plain decoding; drafters fail now and then, requests come and go."""
    tally = Tally()

    @seed(1)
    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck), deadline=None)
    @given(workloads(), settings_(), st.sampled_from([1, 4, 8]), st.booleans(), st.integers(0, 1000))
    def check(requests: list[Request], changed: Settings, k: int, restless: bool, number: int) -> None:
        expected = plain_answers(requests, CUDA)
        engine, random = apart(f"{draft},k={k}", changed, overlap), Random(number)
        assert isinstance(engine.loop, LOOPS[overlap])
        for drafter in engine.drafting.drafters.values():
            assert isinstance(drafter, PlacedDrafter)
            assert not drafter.needs.late
            unreliable(drafter, random)
        if restless:
            engine.controller = RestlessK(draft.partition(":")[0], 8, number)
        got, cancelled = serve(engine, requests, random)
        for name in cancelled:
            begun, whole = got.pop(name), expected.pop(name)
            assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
        assert_same(expected, got)
        tally.add(engine, got)
        tally.stats.overlapped_steps += engine.stats().overlapped_steps
        tally.stats.waited_rows += engine.stats().waited_rows

    check()
    assert sum(tally.verified_at) > 50
    assert tally.stats.untapped_tokens == 0
    return tally


@pytest.mark.parametrize("draft", [OWN_MODEL, "eagle3"])
@pytest.mark.parametrize("overlap", LOOPS)
def test_same_text_with_a_drafter_on_a_device_of_its_own(draft: str, overlap: str) -> None:
    tally = compare(draft if draft == OWN_MODEL else random_head(draft), overlap, FEW)
    assert (tally.stats.overlapped_steps > 50) == (overlap == "on")
    assert (tally.stats.waited_rows > 50) == (overlap == "off")
    assert draft != OWN_MODEL or sum(tally.accepted_at) > 0


FOREIGN = "draft-model:model=other,vocabulary=strings"


@pytest.mark.nightly
@pytest.mark.parametrize("draft", [OWN_MODEL, FOREIGN, "eagle3", "peagle", CORRECTED])
@pytest.mark.parametrize("overlap", LOOPS)
def test_same_text_with_two_devices_over_many_workloads(draft: str, overlap: str) -> None:
    tally = compare(draft if draft in (OWN_MODEL, FOREIGN) else head_of(draft), overlap, 60)
    assert sum(tally.accepted_at) > 0


def test_drafters_of_the_targets_device_draft_late_in_two_groups_too() -> None:
    """With --overlap on and one device nothing is gained, and nothing lost."""
    requests = some_requests()
    engine = make_engine(f"{OWN_MODEL},k=3", PLAIN, types=CUDA, overlap="on")
    assert isinstance(engine.drafting.drafters[NAME], LateDrafter)
    assert_same(plain_answers(requests), run(engine, requests))
    assert engine.stats().overlapped_steps > 10


def some_requests(count: int = 6) -> list[Request]:
    found = []
    for i in range(count):
        params = SamplingParams(temperature=i % 3 / 2, max_tokens=24, repetition_penalty=1.2 if i == 4 else 1.0)
        found.append(Request(str(i), (*range(40, 60), 40 + i, 50, 60), params, seed=i))
    return found


# What passes share --------------------------------------------------------------------------------


def storages(found: Any) -> set[int]:
    """Where the tensors of a record or a mapping lie."""
    values = found.values() if isinstance(found, dict) else [getattr(found, n) for n in found.__dataclass_fields__]
    places: set[int] = set()
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel():
            places.add(value.untyped_storage().data_ptr())
        elif isinstance(value, dict):
            places |= storages(value)
    return places


@pytest.mark.parametrize("overlap", LOOPS)
def test_passes_of_two_steps_share_no_memory_but_the_rows(overlap: str) -> None:
    engine = apart(f"{random_head('eagle3')},k=3", PLAIN, overlap)
    graphs: Any = engine.target.graphs  # type: ignore[attr-defined]
    run_step, outputs = graphs.run, list[Any]()
    graphs.run = lambda *a: outputs.append(run_step(*a)) or outputs[-1]
    run(engine, some_requests())
    of_rows = storages(engine.target.rows.on_device)  # type: ignore[attr-defined]
    found = [storages(one) for one in outputs]
    assert all(one and not one & of_rows for one in found)
    assert all(not one & other for one, other in pairwise(found))


def test_every_kernel_of_a_step_is_launched_on_the_targets_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes a thread's own device: a GPU's number matters in the engine's thread and in that of passes."""
    depth, seen = threading.local(), set[str]()

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        depth.now = getattr(depth, "now", 0) + 1
        yield
        depth.now -= 1

    def watched(call: Any) -> Any:
        def run_within(*a: Any, **k: Any) -> Any:
            assert getattr(depth, "now", 0), "on whatever device this thread has"
            seen.add(threading.current_thread().name)
            return call(*a, **k)

        return run_within

    for module in ("late_target", "late_counts", "late_program"):
        monkeypatch.setattr(f"paceline.backend.cuda.{module}.on_device", on_device)
    for home, name in ((CudaDecoder, "forward"), (CudaDecoder, "logits"), (Program, "_begin")):
        monkeypatch.setattr(home, name, watched(getattr(home, name)))
    monkeypatch.setattr(late, "STEP_TOKENS", 24)  # rows fall behind and catch up
    engine = make_engine(f"{OWN_MODEL},k=3", PLAIN, types=CUDA, overlap="on")
    run(engine, some_requests())
    assert engine.stats().drafter_failures == 0
    assert {"target", threading.main_thread().name} <= seen


# In a process of its own ---------------------------------------------------------------------------


def config(draft: str | None = None, **changes: Any) -> EngineConfig:
    model, drafter = processes.models()
    where = {} if draft == "off" else {"draft_device": ELSEWHERE}
    values = {
        "backend": CUDA,
        "device": "cpu",
        "weights": "f64",
        "limits": LIMITS,
        "kv_tokens": processes.FEW_PAGES * 16,
        "overlap": "off",
    }
    return EngineConfig(model=model, draft=draft or f"{NAME}:model={drafter},k=4", **values | where | changes)


@cache
def loaded() -> build.Loaded:
    return build.load(config("off"))


def engine_of(asked: EngineConfig) -> Engine:
    return build.assemble(asked, loaded()).engine


def plain(asked: list[Request]) -> Any:
    return run(engine_of(config("off")), asked)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(system, "MAX_WAIT_S", 0.01)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("overlap", ["off", pytest.param("on", marks=pytest.mark.nightly)])
def test_no_request_notices_that_the_drafters_process_is_killed(overlap: str) -> None:
    engine, random = engine_of(config(overlap=overlap)), Random(7)
    assert isinstance(engine.loop, LOOPS[overlap])
    drafter = process_of(engine)
    assert isinstance(drafter, RemoteDrafter)
    drafter._deadline_s = 1.0
    sent = deadly(engine, random)
    for number in range(2):
        work = processes.requests(number)
        expected = plain(work)
        got, cancelled = serve(engine, work, random)
        for name in cancelled:
            begun, whole = got.pop(name), expected.pop(name)
            assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
        assert_same(expected, got)
    assert {*sent} == {signal.SIGSTOP, signal.SIGKILL}
    assert engine.stats().drafters[NAME].accepted > 0


def test_rows_wait_for_a_slow_process_and_others_do_not() -> None:
    engine = engine_of(config(kv_tokens=64 * 16))
    drafter: Any = process_of(engine)
    ask = drafter._ask

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return ask(*arguments)

    drafter._ask = slow
    work = processes.requests(1, 4)
    assert_same(plain(work), run(engine, work))
    stats = engine.stats()
    assert stats.drafter_failures == 0
    assert stats.drafters[NAME].accepted > 0
    assert stats.waited_rows > 0


def test_a_process_whose_model_has_no_numbers_drafts_nothing() -> None:
    model = spoilt_model()
    engine = engine_of(config(f"{NAME}:model={model},k=4"))
    work = processes.requests(1, 4)
    assert_same(plain(work), run(engine, work))
    counts = engine.stats().drafters.get(NAME)
    assert counts is None or counts.accepted == 0
    assert engine.scheduler.pool.num_held == 0


@cache
def spoilt_model() -> str:
    weights = processes.tiny_weights(processes.CONFIG, seed=4)
    weights["final_norm"] = torch.full_like(weights["final_norm"], torch.nan)
    return processes.write_model(weights)


# Options ------------------------------------------------------------------------------------------


def test_all_cores_are_a_device_beside_a_target_that_has_one() -> None:
    asked = EngineConfig(backend=CUDA, draft_device="cpu")
    assert asked.placement == Placement(Device(torch_name="cuda"), Device(torch_name="cpu"))
    assert asked.placement.apart
    assert asked.own_model_spec is BACKENDS["native"]
    assert EngineConfig(backend=CUDA, draft_device="cuda:1").own_model_spec is BACKENDS[CUDA]
    assert EngineConfig(backend=CUDA).own_model_spec is BACKENDS[CUDA]
    assert EngineConfig(backend="reference").own_model_spec is BACKENDS["reference"]
    with pytest.raises(ConfigError, match="cores that this process may use"):
        EngineConfig(backend="native", draft_device="cpu")


def test_layers_of_the_target_do_not_leave_it() -> None:
    with pytest.raises(ConfigError, match="the target's own layers"):
        apart("draft-model:layers=2,k=4", PLAIN)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot use the device cuda:7"):
        make_engine(f"{random_head('eagle3')},k=4", PLAIN, types=CUDA, draft_device="cuda:7")
