"""Adapters for trainers, over a real server: the verbs of verl and SkyRL, and the loop of a small trainer.

Neither trainer is installed here. verl's and SkyRL's classes are stand-ins with the fields of their releases.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from safetensors.torch import load_file

from tests.serve.conftest import Server, running, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parents[2] / "examples" / "rollouts"
KEY = "a-key-of-the-trainer"
PROMPT = [40, 50, 60, 70, 80, 90] * 4
SAMPLING = {"temperature": 0.9, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.1, "logprobs": True}


@dataclass
class TokenOutput:
    """Fields of verl's class of the same name."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("newer"), seed=1)


@pytest.fixture(scope="module")
def trained(model: Path) -> Iterator[Server]:
    with running(model, "--rl", "--api-key", KEY) as found:
        yield found


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of `examples/rollouts`, with verl's class where they look for it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    replica = ModuleType("verl.workers.rollout.replica")
    replica.TokenOutput = TokenOutput  # type: ignore[attr-defined]
    for name in ("verl", "verl.workers", "verl.workers.rollout"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.replica", replica)
    return SimpleNamespace(
        **{name: importlib.import_module(name) for name in ("roll_out_client", "verl_adapter", "skyrl_adapter")}
    )


def verl_server(adapters: Any, trained: Server) -> Any:
    """The adapter's server with a process that runs already."""
    server = adapters.verl_adapter.RollOutServer("default", response_length=60)
    server._client = adapters.roll_out_client.RollOutClient(trained.url, KEY)
    return server


async def whole_of(server: Any, sampling: dict[str, Any], cut: asyncio.Event | None = None) -> TokenOutput:
    """Ask as verl's client of partial roll-outs does: again and again, with what there is as a longer prompt."""
    whole = TokenOutput([], [])
    assert whole.log_probs is not None
    limit = sampling["max_tokens"]
    while True:
        asked = sampling | {"max_tokens": limit - len(whole.token_ids)}
        part = await server.generate(PROMPT + whole.token_ids, asked, f"request-{len(whole.token_ids)}")
        whole.token_ids += part.token_ids
        whole.log_probs += part.log_probs or []
        whole.extra_fields.setdefault("parts", []).append((part.stop_reason, part.extra_fields["global_steps"]))
        if part.stop_reason != "aborted":
            return whole
        if cut is not None:
            cut.set()


async def one_writes(server: Server) -> None:
    """Wait until the server has a running request."""
    async with httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as client:
        while "paceline_requests_running 1" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0)


def test_what_verl_cuts_goes_on_exactly(adapters: Any, trained: Server) -> None:
    async def work() -> tuple[TokenOutput, TokenOutput]:
        server = verl_server(adapters, trained)
        sampling = SAMPLING | {"max_tokens": 6000, "seed": 11, "ignore_eos": True}
        whole = await whole_of(server, sampling)
        partial = asyncio.create_task(whole_of(server, sampling))
        await one_writes(trained)
        await server.abort_all_requests()
        await server.resume_generation()
        found = await partial
        await server.client.close()
        return whole, found

    whole, partial = asyncio.run(work())
    assert [reason for reason, _ in partial.extra_fields["parts"]] == ["aborted", "completed"]
    assert partial.token_ids == whole.token_ids
    assert partial.log_probs == whole.log_probs
    assert len(whole.token_ids) == 6000


def test_a_cut_without_a_seed_goes_on_with_that_of_the_first_part(adapters: Any, trained: Server) -> None:
    async def work() -> None:
        client = adapters.roll_out_client.RollOutClient(trained.url, KEY)
        sampling = {"temperature": 0.9, "max_tokens": 6000, "ignore_eos": True}
        task = asyncio.create_task(client.generate(PROMPT, sampling, "a"))
        await one_writes(trained)
        await client.pause("abort")
        await client.go_on()
        first = await task
        assert first.finish == "abort"
        ((kept,),) = client._cut.values()
        rest = await client.generate(PROMPT + first.token_ids, sampling | {"max_tokens": 5}, "b")
        again = await client.generate(
            PROMPT, sampling | {"seed": kept.seed, "max_tokens": len(first.token_ids) + 5}, "c"
        )
        assert first.token_ids + rest.token_ids == again.token_ids
        assert client._cut == {}
        await client.close()

    asyncio.run(work())


def test_an_answer_that_is_on_its_way_when_verl_aborts_is_aborted_too(adapters: Any, trained: Server) -> None:
    async def work() -> TokenOutput:
        paused = asyncio.Event()

        class Slow(adapters.roll_out_client.RollOutClient):  # type: ignore[misc]
            """A client whose roll-outs reach the server after the pause."""

            async def post(self, path: str, body: Any) -> Any:
                if path == "/generate":
                    await paused.wait()
                found = await super().post(path, body)
                if path == "/pause_generation":
                    paused.set()
                return found

        server = verl_server(adapters, trained)
        server._client = Slow(trained.url, KEY)
        task = asyncio.create_task(server.generate(PROMPT, SAMPLING, "late"))
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(server.abort_all_requests(), 120)
            await server.sleep()
            await server.wake_up()
        finally:
            await server.resume_generation()
        found: TokenOutput = await asyncio.wait_for(task, 120)
        await server.client.close()
        return found

    found = asyncio.run(work())
    assert (found.stop_reason, found.token_ids) == ("aborted", [])


@pytest.mark.parametrize("held", [False, True])
def test_an_abort_that_fails_holds_no_further_answers(adapters: Any, held: bool) -> None:
    found: list[Any] = [None] * held + [RuntimeError("503")]
    answers = Answers(*found, [7])

    async def work() -> bool:
        server = adapters.verl_adapter.RollOutServer("default")
        server._client = client_over(adapters, answers)
        if held:
            await server.abort_all_requests(reject_request=True)
        with pytest.raises(RuntimeError, match="503"):
            await server.abort_all_requests()
        asked = server.generate(PROMPT, SAMPLING, "a")
        return bool((await asyncio.wait_for(asked, 120)).token_ids)

    assert asyncio.run(work()) != held, "behind an abort that did not fail they are rejected still"


def test_a_server_that_does_not_start_does_not_stay(
    adapters: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits = tmp_path / "waits"
    waits.write_text("#!/bin/sh\nexec sleep 60\n")
    waits.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(waits))
    monkeypatch.setattr(adapters.verl_adapter, "START_S", 0.2)
    server = adapters.verl_adapter.RollOutServer("default")
    with pytest.raises(RuntimeError, match="did not start"):
        asyncio.run(server.launch_server())
    left, server._process = server._process.poll(), server._process.kill()
    assert left is not None


class Answers:
    """The answers of a server, in turn; an error is raised."""

    def __init__(self, *found: list[int] | Exception, versions: bool = True) -> None:
        """versions: of weights are told; a fleet does not know those of an answer that has lost its replica."""
        self.found, self.bodies = list(found), []  # type: ignore[var-annotated]
        self.versions: dict[str, Any] = {"weight_versions": [{"start": 0, "version": "v"}]} if versions else {}

    async def post(self, path: str, body: Any) -> Any:
        self.bodies.append(body)
        if isinstance(token_ids := self.found.pop(0), Exception):
            raise token_ids
        about = {"output_token_logprobs": [], "finish_reason": {"type": "abort"}, "cached_tokens": 0}
        return {"output_ids": token_ids, "text": "", "meta_info": about | self.versions}


def client_over(adapters: Any, answers: Answers) -> Any:
    class Client(adapters.roll_out_client.RollOutClient):  # type: ignore[misc]
        post = staticmethod(answers.post)

    return Client("http://a", KEY)


def test_a_cut_of_unknown_weights_is_kept_and_gone_on_with(adapters: Any) -> None:
    answers = Answers([7, 8], [9], versions=False)
    client = client_over(adapters, answers)

    async def work() -> Any:
        cut = await client.generate(PROMPT, {}, "a")
        await client.generate([*PROMPT, 7, 8], {}, "b")
        return cut

    cut = asyncio.run(work())
    assert (cut.token_ids, cut.finish, cut.versions) == ([7, 8], "abort", ())
    first, rest = answers.bodies
    assert (rest["answer_ids"], rest["sampling_params"]) == ([7, 8], first["sampling_params"])


def test_a_cut_whose_rest_fails_is_gone_on_with_when_it_is_sent_again(adapters: Any) -> None:
    answers = Answers([7, 8], RuntimeError("503"), [9])
    client = client_over(adapters, answers)

    async def work() -> None:
        await client.generate(PROMPT, {}, "a")
        with pytest.raises(RuntimeError):
            await client.generate([*PROMPT, 7, 8], {}, "b")
        await client.generate([*PROMPT, 7, 8], {}, "c")

    asyncio.run(work())
    first, *others = answers.bodies
    for body in others:
        assert (body["input_ids"], body["answer_ids"]) == (PROMPT, [7, 8])
        assert body["sampling_params"] == first["sampling_params"]


@pytest.mark.parametrize("told", [False, True])
def test_samples_that_were_cut_alike_go_on_apart(adapters: Any, told: bool) -> None:
    """In another order than they began, if their caller tells seeds."""
    answers = Answers(*([7] for _ in range(4)))
    client = client_over(adapters, answers)

    async def work() -> None:
        for seed in (1, 2):
            await client.generate(PROMPT, {"seed": seed}, "a")
        for seed in (2, 1):
            await client.generate([*PROMPT, 7], {"seed": seed} if told else {}, "b")

    asyncio.run(work())
    assert [body["sampling_params"]["sampling_seed"] for body in answers.bodies[2:]] == (
        [2, 1] if told else [1, 2]
    )
    assert all((body["input_ids"], body["answer_ids"]) == (PROMPT, [7]) for body in answers.bodies[2:])


def test_samples_of_a_prompt_that_were_cut_before_they_began_keep_their_seeds(adapters: Any) -> None:
    answers = Answers(*([] for _ in range(4)))
    client = client_over(adapters, answers)

    async def work() -> None:
        for seed in (1, 2, 1, 2):
            await client.generate(PROMPT, {"seed": seed}, "a")

    asyncio.run(work())
    assert [body["sampling_params"]["sampling_seed"] for body in answers.bodies] == [1, 2, 1, 2]


def test_a_small_trainer_takes_steps_through_verl(
    adapters: Any, trained: Server, model: Path, newer: Path
) -> None:
    """Roll out, learn (the newer numbers lie ready), send weights while an answer is open, roll out again."""

    async def work() -> None:
        server = verl_server(adapters, trained)
        await server.set_global_steps(0)
        sampling = SAMPLING | {"max_tokens": 40, "seed": 3, "ignore_eos": True}
        first = await server.generate(PROMPT, sampling, "r0")
        assert (len(first.token_ids), first.extra_fields["global_steps"]) == (40, 0)
        assert first.log_probs is not None and all(score <= 0 for score in first.log_probs)
        crossing = asyncio.create_task(server.generate(PROMPT, sampling | {"max_tokens": 6000}, "crossing"))
        await one_writes(trained)
        await server.update_weights(load_file(newer / "model.safetensors").items(), 1)
        second = await server.generate(PROMPT, sampling, "r1")
        assert second.extra_fields["versions"] == ("step-1",)
        assert second.token_ids != first.token_ids
        await server.abort_all_requests(reject_request=True)
        assert (await crossing).extra_fields["versions"][1] == "step-1"
        late = await server.generate(PROMPT, sampling, "late")
        assert (late.stop_reason, late.token_ids) == ("aborted", [])
        await server.resume_generation()
        await server.clear_kv_cache()
        await server.sleep()
        await server.wake_up()
        await server.update_weights(load_file(model / "model.safetensors").items(), 2)
        third = await server.generate(PROMPT, sampling, "r2")
        assert third.token_ids == first.token_ids, "the first numbers again"
        default = await server.generate(PROMPT, {"temperature": 0, "ignore_eos": True}, "r3")
        assert (len(default.token_ids), default.log_probs) == (60, None), "response_length"
        with pytest.raises(NotImplementedError):
            await server.generate(PROMPT, {}, "picture", image_data=[object()])
        with pytest.raises(RuntimeError, match="top_p"):
            await server.client.post("/generate", {"input_ids": PROMPT, "sampling_params": {"top_p": 7}})
        await server.client.close()

    asyncio.run(work())


def test_verl_s_updates_without_a_step_have_names_of_their_own(adapters: Any) -> None:
    names = []

    async def update(_: object, version: str) -> None:
        names.append(version)

    async def work() -> None:
        server = adapters.verl_adapter.RollOutServer("default")
        server._client = SimpleNamespace(update=update)
        for step in (None, 7, None):
            await server.update_weights([], step)

    asyncio.run(work())
    assert names == ["update-1", "step-7", "update-3"]


def test_skyrl_sends_batches_and_chunks_of_weights(
    adapters: Any, trained: Server, model: Path, newer: Path
) -> None:
    async def work() -> None:
        engine = adapters.skyrl_adapter.RollOutEngine([trained.url], KEY, "default")
        sampling = {"temperature": 0.8, "max_tokens": 20, "seed": 4, "logprobs": 0, "ignore_eos": True}
        batch = {"prompt_token_ids": [PROMPT, PROMPT[:9]], "sampling_params": sampling, "session_ids": ["a", "b"]}
        first = await engine.generate(batch)
        assert [len(ids) for ids in first["response_ids"]] == [20, 20]
        assert [len(scores) for scores in first["response_logprobs"]] == [20, 20]
        assert first["stop_reasons"] == ["length", "length"]
        await engine.pause_generation()
        frozen = asyncio.create_task(engine.generate(batch))
        sender = adapters.skyrl_adapter.WeightSender(engine)
        await sender.send_chunks(chunks_of(newer))
        await engine.resume_generation()
        second = await frozen
        assert second["response_ids"] != first["response_ids"]
        assert engine.weight_version == 1
        await engine.reset_prefix_cache()
        await sender.send_chunks(chunks_of(model))
        assert (await engine.generate(batch))["response_ids"] == first["response_ids"]
        told = await engine.completion({"json": {"model": "default", "prompt": PROMPT, "max_tokens": 3}})
        assert told["usage"]["completion_tokens"] <= 3
        assert await engine.get_world_size() == (1, 1)
        with pytest.raises(ValueError, match="once for each"):
            await engine.generate(batch | {"sampling_params": sampling | {"n": 2}})
        await engine.teardown()

    asyncio.run(work())


class NotingClient:
    """Notes its requests, and ends them at once."""

    def __init__(self, adapters: Any) -> None:
        self.rids: list[str] = []
        self._answer = adapters.roll_out_client.RollOut([1], [-1.0], "stop", "a", 0, ("v",))

    async def generate(self, prompt_ids: Any, sampling: Any, rid: str) -> Any:
        self.rids.append(rid)
        return self._answer


def test_skyrl_s_prompts_go_to_servers_in_turn_and_a_session_to_one(adapters: Any) -> None:
    engine = adapters.skyrl_adapter.RollOutEngine(["http://a", "http://b"], KEY, "default")
    clients = engine._clients[:] = [NotingClient(adapters), NotingClient(adapters)]
    asyncio.run(engine.generate({"prompt_token_ids": [PROMPT] * 6}))
    assert [len(client.rids) for client in clients] == [3, 3]
    asyncio.run(engine.generate({"prompt_token_ids": [PROMPT] * 4, "session_ids": ["a"] * 4}))
    assert sorted(len(client.rids) for client in clients) == [3, 7]
    assert len({rid for client in clients for rid in client.rids}) == 10


def test_skyrl_s_cuts_go_on_at_any_server(adapters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers([7, 8], [9])
    urls: list[str] = []

    async def post(client: Any, path: str, body: Any) -> Any:
        urls.append(client.url)
        return await answers.post(path, body)

    monkeypatch.setattr(adapters.roll_out_client.RollOutClient, "post", post)
    engine = adapters.skyrl_adapter.RollOutEngine(["http://a", "http://b"], KEY, "default")
    for prompt in (PROMPT, [*PROMPT, 7, 8]):
        asyncio.run(engine.generate({"prompt_token_ids": [prompt]}))
    assert urls == ["http://a", "http://b"]
    first, rest = answers.bodies
    assert (rest["input_ids"], rest["answer_ids"]) == (PROMPT, [7, 8])
    assert rest["sampling_params"] == first["sampling_params"]


def chunks_of(model: Path) -> Iterator[Any]:
    """Chunks as SkyRL's extractors make them: some names and tensors each."""
    for name, tensor in load_file(model / "model.safetensors").items():
        yield SimpleNamespace(names=[name], tensors=[tensor])
