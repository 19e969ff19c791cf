"""Newer weights in a running engine: what follows is what a fresh engine with them would write."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from paceline import LLM, SamplingParams, kernels
from paceline.core.errors import BadModelFile, ConfigError, EngineDied, ModelNotFound, RequestError
from paceline.core.request_nouns import Request
from paceline.core.weight_source import WeightSource
from paceline.draft.drafter import Needs
from paceline.engine.assembly import owner
from paceline.engine.prefix_cache import root_hash
from paceline.engine.renewal import rebuild, renew, versioned
from paceline.model.content_key import content_key
from paceline.model.heads.config import read_config
from paceline.model.renewed import renewed
from paceline.model.weights import LazyWeights, load_model
from tests.draft.heads import head_values, random_weights, write_head
from tests.engine.same_text import PLAIN, Answer, Settings, assert_same, make_engine, run
from tests.engine.test_overlapped_loop import overlapped
from tests.serve.conftest import write_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backend.seam import Decoder
    from paceline.engine.engine import Engine

PROMPT = tuple((7 * i + i * i) % 250 for i in range(40))
PARAMS = SamplingParams(temperature=0.9, max_tokens=24, seed=5, ignore_eos=True, repetition_penalty=1.2)
SCORED = replace(PARAMS, logprobs=2)
BACKENDS = [("native", "int8"), ("reference", "f64")]
CUT = 9  # tokens before the weights change


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    return write_model(old), write_model(new, seed=1)


def opened(
    model: Path, backend: str = "native", weights: str = "int8", draft: str = "ngram:k=3", **more: Any
) -> LLM:
    options: dict[str, Any] = {"threads": 1} if backend == "native" else {}
    options |= more
    return LLM(str(model), backend=backend, weights=weights, draft=draft, num_rows=4, max_len=256, **options)


def tensors(model: Path) -> dict[str, Any]:
    return load_file(model / "model.safetensors")


@pytest.fixture(params=BACKENDS, ids=[name for name, _ in BACKENDS])
def backend(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def llm(models: tuple[Path, Path], backend: tuple[str, str]) -> Iterator[LLM]:
    with opened(models[0], *backend) as found:
        yield found
        found.built.engine.check()


def test_an_updated_engine_answers_as_a_fresh_one(llm: LLM, models: tuple[Path, Path], backend) -> None:
    (before,) = llm.generate([PROMPT], SCORED)
    assert llm.generate([PROMPT], SCORED)[0].figures.cached_tokens > 0
    report = llm.update_weights(models[1], "step-1")
    assert report.kept == ("ngram",)
    assert llm.weight_version == "step-1"
    (after,) = llm.generate([PROMPT], SCORED)
    with opened(models[1], *backend) as fresh:
        (expected,) = fresh.generate([PROMPT], SCORED)
    assert after.token_ids == expected.token_ids != before.token_ids
    assert after.logprobs == expected.logprobs
    assert after.figures.cached_tokens == 0, "pages of old weights are never matched"
    assert after.figures.weights == ((0, "step-1"),)
    assert before.figures.weights == ((0, "default"),)


def test_arrays_are_the_same_as_their_file(llm: LLM, models: tuple[Path, Path]) -> None:
    llm.update_weights(models[1], "file")
    (expected,) = llm.generate([PROMPT], SCORED)
    llm.update_weights(models[0], "back")
    llm.update_weights(tensors(models[1]), "arrays")
    assert llm.generate([PROMPT], SCORED)[0].token_ids == expected.token_ids


def test_an_open_answer_goes_on_as_if_its_tokens_were_told_to_the_newer_model(
    llm: LLM, models: tuple[Path, Path], backend
) -> None:
    token_ids, figures = [], None
    for delta in llm.stream(PROMPT, SCORED):
        token_ids += delta.token_ids
        if len(token_ids) >= CUT and llm.weight_version != "newer":
            llm.update_weights(models[1], "newer")
        figures = delta.figures or figures
    assert figures is not None
    (_, (start, version)) = figures.weights
    assert version == "newer"
    assert CUT <= start < len(token_ids)
    with opened(models[1], *backend) as fresh:
        engine = fresh.built.engine
        engine.add(Request("r", PROMPT, SCORED, seed=5, told=tuple(token_ids[:start])))
        rest = [token for o in stepped(engine) for token in o.token_ids]
    assert rest == token_ids[start:]


def test_scores_of_a_prompt_are_of_one_version(models: tuple[Path, Path], backend) -> None:
    request = Request("r", PROMPT, replace(SCORED, prompt_logprobs=0), seed=5)
    with (
        opened(models[0], *backend, prefill_tokens=16) as llm,
        opened(models[1], *backend, prefill_tokens=16) as fresh,
    ):
        llm.built.engine.add(request)
        llm.built.engine.step()
        llm.built.engine.settle()
        assert llm.built.engine.outputs.responses["r"].prompt_logprobs, "some are known already"
        llm.update_weights(models[1], "newer")
        fresh.built.engine.add(request)
        found, expected = (
            next(o.prompt_logprobs for o in stepped(one.built.engine) if o.prompt_logprobs) for one in (llm, fresh)
        )
    assert found == expected


def stepped(engine: Engine) -> Iterator[Any]:
    while engine.has_work:
        yield from engine.step()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda t: {"model.layers.9.x": t["model.norm.weight"], **t}, BadModelFile, "no tensor"),
        (lambda t: {**t, "model.norm.weight": np.zeros(3, np.float32)}, BadModelFile, "shape"),
        (lambda t: {n: v for n, v in t.items() if "norm" not in n}, BadModelFile, "missing"),
    ],
)
def test_bad_tensors_change_nothing(llm: LLM, models: tuple[Path, Path], spoil, error, message) -> None:
    (before,) = llm.generate([PROMPT], SCORED)
    with pytest.raises(error, match=message):
        llm.update_weights(spoil(tensors(models[1])), "bad")
    assert llm.weight_version == "default"
    assert llm.generate([PROMPT], SCORED)[0].token_ids == before.token_ids


def test_a_model_of_another_shape_is_refused(llm: LLM, models: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_model(tmp_path)
    config = (other / "config.json").read_text().replace('"rope_theta": 10000.0', '"rope_theta": 500.0')
    (other / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="only weights can be renewed"):
        llm.update_weights(other, "other")
    with pytest.raises(ModelNotFound, match="no folder"):
        llm.update_weights(tmp_path / "nowhere", "other")
    with pytest.raises(RequestError, match="weight_version"):
        llm.update_weights(models[1], "")


def test_memory_is_given_back_and_the_weights_return(llm: LLM, models: tuple[Path, Path]) -> None:
    llm.update_weights(models[1], "newer")
    (before,) = llm.generate([PROMPT], SCORED)
    for tags in (("kv_cache",), ("weights",), ("weights", "kv_cache")):
        llm.release_memory(tags)
        with pytest.raises(EngineDied, match="given back"):
            llm.generate([PROMPT], SCORED)
        llm.resume_memory(tags)
        (after,) = llm.generate([PROMPT], SCORED)
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
        assert after.figures.weights == ((0, "newer"),)
    llm.release_memory()
    llm.resume_memory(("kv_cache",))
    llm.update_weights(models[0], "woken")  # in place of weights that were given back
    assert llm.generate([PROMPT], SCORED)[0].figures.weights == ((0, "woken"),)


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_of_kv_is_given_back_while_the_weights_stay(
    models: tuple[Path, Path], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Store(kernels.KVStore):
        """A store to which weak references are possible."""

    monkeypatch.setattr(kernels, "KVStore", Store)
    with opened(models[0], threads=threads) as llm:
        llm.generate([PROMPT], SCORED)
        kv = ref(llm.built.engine.target.kv)
        assert kv() is not None
        llm.release_memory(("kv_cache",))
        assert kv() is None


def test_memory_that_was_freed_is_returned_once_the_engine_is_gone(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would keep it for later, so that no other program could have it."""
    alive: list[bool] = []
    with opened(models[0], "cuda", "f64", device="cpu") as llm:
        engine = ref(llm.built.engine)
        monkeypatch.setattr("torch.cuda.empty_cache", lambda: alive.append(engine() is not None))
        llm.release_memory(("kv_cache",))
        llm.release_memory(("weights",))
    assert alive == [False, False]


def test_freed_memory_goes_to_the_system_behind_an_update_and_a_release(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library would keep it: 60 MB more with each update of 135 million weights, and all of a release."""
    seen: list[tuple[str, bool]] = []
    with opened(models[0]) as llm:
        engine = ref(llm.built.engine)
        monkeypatch.setattr(
            owner, "give_memory_back", lambda: seen.append((llm.weight_version, engine() is not None))
        )
        llm.update_weights(models[1], "newer")
        llm.release_memory()
    assert seen == [("newer", True), ("newer", False)]


def test_memory_stays_while_an_answer_is_open(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SCORED)
    next(stream)
    with pytest.raises(RequestError, match="abort"):
        llm.release_memory()
    llm.abort()
    *_, last = stream
    assert last.finish_reason == "abort"
    assert last.figures is not None
    llm.release_memory()
    llm.resume_memory()


def test_memory_is_given_back_behind_streams_that_were_dropped_or_aborted(llm: LLM) -> None:
    for _ in llm.stream(PROMPT, SCORED):
        break
    llm.release_memory()
    llm.resume_memory()
    stream = llm.stream(PROMPT, SCORED)
    next(stream)
    llm.abort()
    llm.release_memory()
    *_, last = stream
    assert last.finish_reason == "abort", "it was delivered before"
    llm.resume_memory()


def test_a_part_of_the_tensors_replaces_only_these(models: tuple[Path, Path], tmp_path: Path) -> None:
    new, name = tensors(models[1]), "model.layers.1.mlp.down_proj.weight"
    save_file({name: new[name]}, tmp_path / "1.safetensors")
    old = load_model(models[0])
    found = renewed(lambda: old, WeightSource(tensors=str(tmp_path)))
    assert (found.weights["layers.1.mlp_down"] == new[name]).all()
    others = [n for n in old.weights if n != "layers.1.mlp_down"]
    assert all((found.weights[n] == old.weights[n]).all() for n in others)


def test_tensors_that_must_be_all_are_refused_if_one_is_missing(models: tuple[Path, Path], tmp_path: Path) -> None:
    new, name = tensors(models[1]), "model.layers.1.mlp.down_proj.weight"
    source = WeightSource(tensors=str(tmp_path), whole=True)
    save_file(new, tmp_path / "1.safetensors")
    found = renewed(lambda: load_model(models[0]), source)
    assert (found.weights["layers.1.mlp_down"] == new[name]).all()
    del new[name]
    save_file(new, tmp_path / "1.safetensors")
    with pytest.raises(BadModelFile, match="1 tensors are missing, such as layers"):
        renewed(lambda: load_model(models[0]), source)


def test_tensors_in_a_folder_of_another_machine_are_said_to_be(models: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="on another machine: engines read"):
        renewed(lambda: load_model(models[0]), WeightSource(tensors=str(tmp_path / "none")))


def test_a_file_whose_tensors_all_came_again_does_not_count(models: tuple[Path, Path], tmp_path: Path) -> None:
    old, new, name = tensors(models[0]), tensors(models[1]), "model.layers.1.mlp.down_proj.weight"
    save_file({name: new[name]}, tmp_path / "2.safetensors")
    source, keys = WeightSource(tensors=str(tmp_path)), []
    for tensor in (old[name], None):
        if tensor is not None:
            save_file({name: tensor}, tmp_path / "1.safetensors")
        else:
            (tmp_path / "1.safetensors").unlink()
        weights = renewed(lambda: load_model(models[0]), source).weights
        assert isinstance(weights, LazyWeights)
        keys.append(content_key(weights.sources))
    assert keys[0] == keys[1], "a replica that restarts later has the same promise key"


# Drafters that share tables ------------------------------------------------------------------------


@pytest.fixture
def head(models: tuple[Path, Path], tmp_path: Path) -> Path:
    """A head with random weights: its drafts are seldom kept."""
    config = load_model(models[0]).config
    values = head_values("eagle3", config)
    return write_head(tmp_path, values, config, random_weights(read_config(values, config)))


def test_a_head_is_built_again_over_the_newer_tables(models: tuple[Path, Path], head: Path, backend) -> None:
    with (
        opened(models[0], *backend, draft="off") as plain,
        opened(models[0], *backend, draft=f"eagle3:model={head},k=2") as llm,
    ):
        for version, model in (("newer", models[1]), ("back", models[0])):
            before = llm.built.engine.drafting.drafters["eagle3"]
            assert llm.update_weights(model, version).rebuilt == ("eagle3",)
            assert llm.built.engine.drafting.drafters["eagle3"] is not before
            plain.update_weights(model, version)
            (found,), (expected,) = llm.generate([PROMPT], SCORED), plain.generate([PROMPT], SCORED)
            assert found.token_ids == expected.token_ids
            assert found.figures.drafted_tokens > 0
        llm.built.engine.check()


def test_a_head_that_cannot_be_built_again_is_unloaded(models: tuple[Path, Path], head: Path, backend) -> None:
    with opened(models[0], *backend, draft=f"eagle3:model={head},k=2") as llm:
        shutil.rmtree(head)
        assert llm.update_weights(models[1], "newer").unloaded == ("eagle3",)
        (found,) = llm.generate([PROMPT], SCORED)
        assert found.figures.drafted_tokens == 0
        llm.built.engine.check()


# What fails late ---------------------------------------------------------------------------------


def test_a_drafter_for_which_memory_lacks_is_unloaded(models: tuple[Path, Path], head: Path, backend) -> None:
    def lacking(_: Any) -> Any:
        raise MemoryError

    with opened(models[0], *backend, draft=f"eagle3:model={head},k=2") as llm:
        llm.built.rebuild["eagle3"] = lacking
        assert llm.update_weights(models[1], "newer").unloaded == ("eagle3",)
        assert llm.weight_version == "newer"


def test_a_drafter_may_be_unloaded_while_another_is_made_anew() -> None:
    drafters: dict[str, Any] = {}

    class Unloading:
        """Unloads the other, as the engine does in its own thread."""

        @property
        def needs(self) -> Needs:
            drafters.pop("b", None)
            return Needs(kv_bytes_per_token=1)

    drafters |= {"a": Unloading(), "b": Unloading()}
    made = rebuild(drafters, {"a": lambda _: drafters["a"]}, cast("Decoder", None))
    assert made == drafters


@pytest.mark.parametrize("where", ["settle", "release_rows"])
def test_an_update_that_breaks_off_leaves_the_old_version(
    llm: LLM, models: tuple[Path, Path], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("broken")

    (before,) = llm.generate([PROMPT], SCORED)
    with monkeypatch.context() as patch:
        patch.setattr(llm.built.engine, where, broken)
        with pytest.raises(RuntimeError, match="broken"):
            llm.update_weights(models[1], "newer")
    (after,) = llm.generate([PROMPT], SCORED)
    assert (after.token_ids, after.figures.weights) == (before.token_ids, ((0, "default"),))
    assert llm.weight_version == "default"


def test_weights_are_taken_though_the_engine_does_not_wake(
    llm: LLM, models: tuple[Path, Path], backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise MemoryError

    llm.release_memory(("weights",))
    with monkeypatch.context() as patch:
        patch.setattr(owner, "assemble", no_room)
        llm.update_weights(models[1], "newer")
    assert llm.weight_version == "newer"
    llm.resume_memory(("weights",))
    llm.release_memory(("weights",))
    llm.resume_memory(("weights",))  # from the newer source
    with opened(models[1], *backend) as fresh:
        (expected,) = fresh.generate([PROMPT], SCORED)
    assert llm.generate([PROMPT], SCORED)[0].token_ids == expected.token_ids


def test_files_that_changed_meanwhile_have_another_mark(
    llm: LLM, models: tuple[Path, Path], tmp_path: Path
) -> None:
    latest = shutil.copytree(models[1], tmp_path / "latest")
    llm.update_weights(latest, "latest")
    before = llm._owned.mark
    llm.release_memory(("weights",))
    llm.resume_memory(("weights",))
    assert llm._owned.mark == before
    llm.release_memory(("weights",))
    shutil.copy(models[0] / "model.safetensors", latest)
    llm.resume_memory(("weights",))
    assert llm._owned.mark != before, "pages on disk of the first are not the second's"


def test_no_salt_names_the_pages_of_other_weights() -> None:
    """Old pages stay on disk, and clients choose salts: a salt must not reach them."""
    mark = "newer\0digest"
    for salt in ("", "mine"):
        assert root_hash(versioned("kv", mark), salt) != root_hash("kv", f"{mark}\0{salt}")


def test_files_of_another_shape_do_not_come_back(llm: LLM, models: tuple[Path, Path], tmp_path: Path) -> None:
    """The trainer has written its next model there."""
    latest = shutil.copytree(models[1], tmp_path / "latest")
    llm.update_weights(latest, "latest")
    llm.release_memory(("weights",))
    write_model(latest, num_layers=4)
    for _ in range(2):
        with pytest.raises(ConfigError, match="only weights can be renewed"):
            llm.resume_memory(("weights",))
    llm.update_weights(models[1], "usual")
    assert llm.generate([PROMPT], SCORED)[0].figures.weights == ((0, "usual"),)


def test_the_first_files_are_marked_where_they_changed_meanwhile(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    first = shutil.copytree(models[0], tmp_path / "first")
    with opened(first) as llm:
        marks = []
        for model in (models[0], models[1], models[0]):
            llm.release_memory(("weights",))
            shutil.copy(model / "model.safetensors", first)
            llm.resume_memory(("weights",))
            marks.append(llm._owned.mark)
    assert not marks[0]
    assert len(set(marks)) == 3


# In any loop -------------------------------------------------------------------------------------

REQUESTS = [Request(str(i), PROMPT[: 20 + i], PARAMS, seed=i) for i in range(5)]
NGRAM, DRAFT = "ngram:k=3", "draft-model:model=noisy,k=3"
MAKERS = {
    "serial": lambda: make_engine(NGRAM, Settings(num_rows=3, prefix_cache=True)),
    "overlapped": lambda: overlapped(DRAFT, PLAIN),
    "late": lambda: make_engine(NGRAM, PLAIN, types="cuda"),
}


@pytest.mark.parametrize("loop", MAKERS)
@settings(max_examples=8, deadline=None)
@given(steps=st.sets(st.integers(0, 25), max_size=4))
def test_the_same_weights_anew_at_any_step_change_no_answer(loop: str, steps: set[int]) -> None:
    types = "cuda" if loop == "late" else "f64"
    expected = run(make_engine("off", PLAIN, types=types), REQUESTS)
    engine, answers, step = MAKERS[loop](), {r.request_id: Answer() for r in REQUESTS}, 0
    for request in REQUESTS:
        engine.add(request)
    while engine.has_work:
        if step in steps:
            renew(engine, lambda: None, f"v{step}", f"v{step}", {})
            engine.check()
        for outcome in engine.step():
            answers[outcome.request_id].take(outcome)
        step += 1
    assert_same(expected, answers)
