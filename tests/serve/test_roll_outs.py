"""A trainer's routes over a real server: roll-outs that are cut and go on, newer weights, memory given back."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from safetensors import safe_open
from safetensors.torch import save

from paceline.core.errors import ConfigError
from paceline.engine.assembly.config import Choice
from paceline.serve.api.roll_outs import RollOuts
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.operation import OperationOptions
from paceline.serve.server import HttpConfig
from paceline.serve.worker.commands import EngineState
from tests.serve.conftest import OUTLASTING, OUTLASTING_LEN, PATIENCE_S, Server, running, write_model
from tests.serve.test_faults import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
PROMPT = [40, 50, 60, 70, 80, 90] * 4
SAMPLING = {"max_new_tokens": 40, "temperature": 0.9, "sampling_seed": 7, "ignore_eos": True}
LONG = SAMPLING | {"max_new_tokens": 120_000}  # it is cut before it ends


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("newer"), seed=1, max_len=OUTLASTING_LEN)


@pytest.fixture(scope="module")
def trained(long_model: Path) -> Iterator[Server]:
    with running(long_model, "--rl", *OUTLASTING) as found:
        yield found


@pytest.fixture
def rl(trained: Server) -> Iterator[httpx.Client]:
    with trained.client() as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def generate(client: httpx.Client, **body: Any) -> Any:
    return post(client, "/generate", **{"input_ids": PROMPT, "sampling_params": SAMPLING} | body)


def test_ids_go_in_and_ids_and_log_probabilities_come_out(rl: httpx.Client) -> None:
    found = generate(
        rl, return_logprob=True, top_logprobs_num=2, logprob_start_len=0, return_text_in_logprobs=True
    )
    about, ids = found["meta_info"], found["output_ids"]
    assert len(ids) == about["completion_tokens"] == 40
    assert about["finish_reason"] == {"type": "length", "length": 40}
    assert about["weight_version"] == rl.get("/get_weight_version").json()["weight_version"]
    assert [entry[1] for entry in about["output_token_logprobs"]] == ids
    assert all(entry[0] <= 0 and isinstance(entry[2], str) for entry in about["output_token_logprobs"])
    assert all(len(top) == 2 for top in about["output_top_logprobs"])
    assert [entry[1] for entry in about["input_token_logprobs"]] == PROMPT
    first, *tops = about["input_top_logprobs"]
    assert first is None
    assert [len(top) for top in tops] == [2] * (len(PROMPT) - 1)
    best = [top[0][0] for top in tops]
    assert all(entry[0] <= top for entry, top in zip(about["input_token_logprobs"][1:], best, strict=True))
    text = post(
        rl, "/v1/completions", prompt=PROMPT, max_tokens=40, temperature=0.9, top_p=1, seed=7, ignore_eos=True
    )
    assert text["choices"][0]["text"] == found["text"], "the same text as of every other route"


def test_several_prompts_and_answers_are_a_list(rl: httpx.Client) -> None:
    many = generate(rl, input_ids=[PROMPT, PROMPT[:5]], sampling_params=SAMPLING | {"n": 2}, rid=["a", "b"])
    assert [one["meta_info"]["id"] for one in many] == ["a", "a", "b", "b"]
    assert many[0]["output_ids"] == generate(rl)["output_ids"] != many[1]["output_ids"]


def test_a_stream_has_answers_as_far_as_they_have_come(rl: httpx.Client) -> None:
    whole = generate(rl)
    with rl.stream(
        "POST", "/generate", json={"input_ids": PROMPT, "sampling_params": SAMPLING, "stream": True}
    ) as r:
        lines = [line.removeprefix("data: ") for line in r.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert all(whole["output_ids"][: len(c["output_ids"])] == c["output_ids"] for c in chunks)
    assert chunks[-1]["text"] == whole["text"]
    assert [c["meta_info"]["finish_reason"] is None for c in chunks] == [True] * (len(chunks) - 1) + [False]


@pytest.mark.parametrize("cut", [1, 17, 39])
def test_a_roll_out_goes_on_behind_its_tokens(rl: httpx.Client, cut: int) -> None:
    whole = generate(rl, return_logprob=True)
    rest = generate(rl, return_logprob=True, answer_ids=whole["output_ids"][:cut])
    assert rest["output_ids"] == whole["output_ids"][cut:]
    scores = [one["meta_info"]["output_token_logprobs"] for one in (rest, whole)]
    assert scores[0] == scores[1][cut:]
    assert rest["meta_info"]["answer_tokens"] == 40


class Open:
    """A long roll-out that is being written."""

    def __init__(self, client: httpx.Client, rid: str, **body: Any) -> None:
        self._started = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._body = {"input_ids": PROMPT, "sampling_params": LONG, "rid": rid, "stream": True} | body
        self._done = self._pool.submit(self._read, client)
        assert self._started.wait(PATIENCE_S)

    def _read(self, client: httpx.Client) -> Any:
        last = None
        with client.stream("POST", "/generate", json=self._body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    last = line
                    if not self._started.is_set() and len(_answer_in(line)["output_ids"]) > 3:
                        self._started.set()
        assert last is not None
        return _answer_in(last)

    def result(self) -> Any:
        return self._done.result(PATIENCE_S)


def _answer_in(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))


def test_an_aborted_roll_out_gives_what_it_has_and_goes_on_exactly(rl: httpx.Client) -> None:
    one, other = Open(rl, "one"), Open(rl, "other")
    assert post(rl, "/abort_request", rid="one")["aborted"] == 1
    cut = one.result()
    assert cut["meta_info"]["finish_reason"]["type"] == "abort"
    assert post(rl, "/abort_request", abort_all=True)["aborted"] == 1
    assert other.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert post(rl, "/abort_request", rid="nobody")["aborted"] == 0
    length = len(cut["output_ids"]) + 20
    asked = SAMPLING | {"max_new_tokens": length}
    rest = generate(rl, sampling_params=asked, answer_ids=cut["output_ids"])
    assert generate(rl, sampling_params=asked)["output_ids"] == cut["output_ids"] + rest["output_ids"]


def test_a_pause_keeps_or_aborts(rl: httpx.Client) -> None:
    kept = Open(rl, "kept")
    post(rl, "/pause_generation", mode="keep")
    steps = _Steps(rl)
    assert eventually(steps.are_as_before), "no step while it is paused"
    post(rl, "/continue_generation")
    assert eventually(lambda: not steps.are_as_before())
    post(rl, "/abort_request", rid="kept")
    part = kept.result()["output_ids"]
    assert generate(rl, sampling_params=LONG | {"max_new_tokens": len(part)})["output_ids"] == part
    gone = Open(rl, "gone")
    assert post(rl, "/pause_generation")["aborted"] == 1
    assert gone.result()["meta_info"]["finish_reason"]["type"] == "abort"
    waiting = ThreadPoolExecutor(1).submit(generate, rl)
    time.sleep(0.2)
    assert not waiting.done()
    post(rl, "/continue_generation")
    assert len(waiting.result(PATIENCE_S)["output_ids"]) == 40


class _Steps:
    """The counter of steps."""

    def __init__(self, client: httpx.Client) -> None:
        self._client, self._last = client, ""

    def are_as_before(self) -> bool:
        """Return whether it is what it was at the last call, and stays so for some of the engine's messages."""
        before, self._last = self._last, self._now()
        time.sleep(0.6)  # it tells its counters four times a second, or twice without work
        return before == self._last == self._now()

    def _now(self) -> str:
        metrics = self._client.get("/metrics").text
        return next(line for line in metrics.splitlines() if line.startswith("paceline_steps_total"))


def test_newer_weights_come_from_disk_and_from_tensors(
    trained: Server, rl: httpx.Client, long_model: Path, newer: Path
) -> None:
    old = generate(rl)
    crossing = Open(rl, "crossing")
    done = post(rl, "/update_weights_from_disk", model_path=str(newer), weight_version="v1")
    assert done["success"]
    assert done["drafters"]["kept"] == ["ngram"]
    new = generate(rl)
    assert new["output_ids"] != old["output_ids"]
    assert (
        rl.get("/get_weight_version").json()
        == {"weight_version": "v1"}
        == {"weight_version": new["meta_info"]["weight_version"]}
    )
    post(rl, "/abort_request", abort_all=True)
    (first, second) = crossing.result()["meta_info"]["weight_versions"]
    assert (first["version"], second["version"]) == ("default", "v1")
    assert first["start"] == 0 < second["start"]

    with safe_open(long_model / "model.safetensors", "pt") as file:
        names = sorted(file.keys())
        for i, name in enumerate(names):
            last = {"chunks": str(len(names)), "weight_version": "v2"} if i + 1 == len(names) else {}
            answer = send_tensors(rl, {name: file.get_tensor(name)}, chunk=str(i + 1), **last)
            assert answer.status_code == 200, answer.text
    again = generate(rl)
    assert again["output_ids"] == old["output_ids"]
    assert again["meta_info"]["weight_version"] == "v2"

    restarts = trained.metric("paceline_engine_restarts_total")
    os.kill(trained.engine_pid(), signal.SIGKILL)  # the next engine has the newest weights, too
    assert eventually(lambda: trained.metric("paceline_engine_restarts_total") > restarts)
    assert eventually(lambda: trained.health() == 200)
    assert generate(rl)["output_ids"] == old["output_ids"]
    assert generate(rl)["meta_info"]["weight_version"] == "v2"
    post(rl, "/update_weights_from_disk", model_path=str(long_model))


def send_tensors(client: httpx.Client, tensors: dict[str, Any], **asked: str) -> httpx.Response:
    return client.post(
        "/update_weights_from_tensor",
        content=save(tensors),
        params=asked,
        headers={"content-type": "application/octet-stream"},
    )


def test_bad_updates_are_told_and_change_nothing(rl: httpx.Client, tmp_path: Path) -> None:
    import torch

    old, version = generate(rl)["output_ids"], rl.get("/get_weight_version").json()
    missing = rl.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "nowhere")})
    assert (missing.status_code, missing.json()["success"]) == (400, False)
    wrong = send_tensors(rl, {"model.norm.weight": torch.zeros(3)})
    assert wrong.status_code == 400
    assert "shape" in wrong.json()["message"]
    broken = rl.post(
        "/update_weights_from_tensor", content=b"no file", headers={"content-type": "application/octet-stream"}
    )
    assert (broken.status_code, broken.json()["success"]) == (400, False)
    pickled = rl.post("/update_weights_from_tensor", json={"serialized_named_tensors": ["gASV"]})
    assert pickled.status_code == 415
    assert "safetensors" in pickled.text
    assert generate(rl)["output_ids"] == old
    assert rl.get("/get_weight_version").json() == version


def test_memory_is_given_back_while_the_trainer_works(rl: httpx.Client) -> None:
    old = generate(rl)["output_ids"]
    assert post(rl, "/flush_cache")["success"]
    assert generate(rl)["meta_info"]["cached_tokens"] == 0
    busy = Open(rl, "busy")
    refused = rl.post("/release_memory_occupation", json={})
    assert refused.status_code == 400
    assert "abort" in refused.text
    post(rl, "/abort_request", abort_all=True)
    busy.result()
    post(rl, "/release_memory_occupation", tags=["weights", "kv_cache"])
    asleep = rl.post("/generate", json={"input_ids": PROMPT})
    assert asleep.status_code == 503
    assert "resume" in asleep.text
    assert rl.get("/health").status_code == 200
    post(rl, "/resume_memory_occupation", tags=["weights"])
    post(rl, "/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    assert generate(rl)["output_ids"] == old
    about = rl.get("/get_server_info").json()
    assert rl.get("/server_info").json() == rl.get("/model_info").json() == about
    assert rl.get("/health_generate", headers={"authorization": ""}).status_code == 200
    assert about["weight_version"] == rl.get("/get_weight_version").json()["weight_version"]


def test_a_server_tells_of_all_its_drafters() -> None:
    choices = (Choice("draft", "suffix (k 8)", ""), Choice("law", "coupled", ""), Choice("draft", "grammar", ""))
    fields = {"model_name": "m", "max_len": 8, "vocab_size": 9, "drafters": (), "choices": choices}
    commands = SimpleNamespace(state=EngineState(), version="default")
    engines: Any = SimpleNamespace(ready=SimpleNamespace(**fields), commands=commands, num_open=0)
    about = json.loads(bytes(asyncio.run(RollOuts(engines)._about(None)).body))  # type: ignore[arg-type]
    assert about["choices"] == {"draft": "suffix (k 8), grammar", "law": "coupled"}


def test_a_process_that_dies_while_its_memory_is_given_back_gives_it_back_again(
    trained: Server, rl: httpx.Client
) -> None:
    old, restarts = generate(rl)["output_ids"], trained.metric("paceline_engine_restarts_total")
    post(rl, "/release_memory_occupation")
    os.kill(trained.engine_pid(), signal.SIGKILL)
    assert eventually(lambda: trained.metric("paceline_engine_restarts_total") > restarts)
    assert eventually(lambda: trained.health() == 200)
    asleep = rl.post("/generate", json={"input_ids": PROMPT})
    assert asleep.status_code == 503
    assert "kv_cache and weights" in asleep.text
    post(rl, "/resume_memory_occupation")
    assert generate(rl)["output_ids"] == old


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_page_of_another_site_cannot_empty_the_cache(rl: httpx.Client, method: str) -> None:
    """An image with this address would do: browsers say what asks, and do not ask first."""
    for site, status in {"cross-site": 403, "same-site": 403, "none": 200}.items():
        assert rl.request(method, "/flush_cache", headers={"sec-fetch-site": site}).status_code == status
    assert rl.request(method, "/flush_cache").status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "input_ids"),
        ({"input_ids": PROMPT, "text": "x"}, "either"),
        ({"input_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": PROMPT, "rid": ["a", "b"]}, "rid"),
        ({"input_ids": PROMPT, "answer_ids": [[1], [2]]}, "answer_ids"),
        ({"input_ids": PROMPT, "answer_ids": [1], "sampling_params": {"n": 2}}, "n = 1"),
        (
            {"input_ids": PROMPT, "answer_ids": [1] * 5, "sampling_params": {"max_new_tokens": 4}},
            "answer_ids has 5 tokens",
        ),
        ({"input_ids": PROMPT, "answer_ids": [9999]}, "vocabulary"),
        ({"input_ids": PROMPT, "logprob_start_len": 5}, "logprob_start_len"),
        (
            {"input_ids": PROMPT, "answer_ids": [1], "return_logprob": True, "logprob_start_len": 0},
            "scores of a prompt",
        ),
        ({"input_ids": [9999]}, "vocabulary"),
    ],
)
def test_wrong_roll_outs_are_refused_by_name(rl: httpx.Client, body: dict[str, Any], says: str) -> None:
    response = rl.post("/generate", json=body)
    assert response.status_code == 400
    assert says in response.text


def test_without_the_flag_there_is_none_of_it(http: httpx.Client) -> None:
    for path in ("/generate", "/abort_request", "/update_weights_from_disk", "/release_memory_occupation"):
        refused = http.post(path, json={})
        assert refused.status_code == 404
        assert "--rl" in refused.text


def test_the_routes_go_with_a_key_or_this_machine_only() -> None:
    rl = OperationOptions(rl=True)
    with pytest.raises(ConfigError, match="--api-key"):
        HttpConfig(operation=rl, insecure=True)
    for twice in ({"audit": 0.5}, {"hedge": "p95"}):
        with pytest.raises(ConfigError, match=f"--{next(iter(twice))} goes without --rl"):
            HttpConfig(operation=rl, fleet=ReplicaOptions(replicas=2, **twice))
    HttpConfig(operation=rl, insecure=True, api_key="secret")


def test_commands_reach_every_replica(long_model: Path, newer: Path) -> None:
    flags = ("--rl", "--replicas", "2", "--route", "round-robin", "--draft", "off", *OUTLASTING)
    with running(long_model, *flags) as server, server.client() as client:
        assert eventually(
            lambda: [line["state"] for line in client.get("/v1/fleet").json()["replicas"]] == ["up"] * 2
        )
        replicas = client.get("/v1/fleet").json()["replicas"]
        old = [generate(client)["output_ids"] for _ in range(2)]
        assert old[0] == old[1]
        one = Open(client, "one")
        post(client, "/update_weights_from_disk", model_path=str(newer), weight_version="v1")
        new = [generate(client) for _ in range(4)]
        assert {answer["meta_info"]["weight_version"] for answer in new} == {"v1"}
        assert all(answer["output_ids"] == new[0]["output_ids"] != old[0] for answer in new)
        fleet = client.get("/v1/fleet").json()
        promises = {line["promise"] for line in fleet["replicas"]}
        assert len(promises) == 1
        assert promises != {line["promise"] for line in replicas}
        (crossing,) = fleet["requests"]  # began by old weights; it goes on by newer ones elsewhere, too
        os.kill(fleet["replicas"][int(crossing["replica"])]["pid"], signal.SIGKILL)
        assert eventually(lambda: client.get("/v1/fleet").json()["requests"][0]["legs"] == 2)
        assert post(client, "/abort_request", abort_all=True)["aborted"] == 1
        about = one.result()["meta_info"]
        assert [w["version"] for w in about["weight_versions"]] == ["default", "v1"]
        assert about["weight_versions"][0]["start"] == 0 < about["weight_versions"][1]["start"]


def test_the_example_loses_no_token(model: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "partial_roll_outs.py"
    spec = importlib.util.spec_from_file_location("partial_roll_outs", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert asyncio.run(example.main(str(model), "ngram:k=4")) == {"cut": 0, "again": 0}
