"""What an engine has learnt begins the next one, in files that anything may have happened to."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from paceline import LLM
from paceline.control.controller import ClosedLoop
from paceline.control.goodput import Goodput
from paceline.control.trace_files import read_head, replay
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.assembly import auto
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.renewal import renew
from paceline.model.files.kept_data import LEARNT, MAX_KEPT, KeptData
from paceline.model.files.kept_models import kept_models
from tests.engine.same_text import PLAIN, STAIRCASE, assert_same, make_engine, plain_answers, run
from tests.serve.conftest import write_model

DRAFT = "auto:suffix+draft-model:model=noisy,k=4"
CONFIG = EngineConfig(draft="auto", profile=STAIRCASE)
PARAMS = SamplingParams(temperature=0.7, max_tokens=60, ignore_eos=True)
REQUESTS = [Request(str(i), (5, 9, 13, 7) * 5, PARAMS, seed=i) for i in range(12)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_learnt: None) -> Path:
    """A cache of the test's own, in which what is learnt is kept."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(auto, "LEARNT", LEARNT)
    return tmp_path


def started(config: EngineConfig = CONFIG) -> tuple[Engine, str]:
    engine = make_engine(DRAFT, PLAIN, keep_learnt=False)
    return engine, auto.close_loop(engine, config, "tiny of-tests")


def serve_and_end(config: EngineConfig = CONFIG) -> str:
    """Serve some requests in an engine of its own; return what it said when it began."""
    engine, said = started(config)
    assert_same(plain_answers(REQUESTS), run(engine, REQUESTS))
    engine.close()
    return said


def known(engine: Engine) -> list[float]:
    """Chances by depth, and corrections of prices, which every run learns."""
    loop = engine.controller
    assert isinstance(loop, ClosedLoop)
    assert isinstance(loop.policy, Goodput)
    assert loop.cost is not None
    chances = (model.depth_logit.tolist() for model in loop.policy.choice.models)
    return [*chain.from_iterable(chances), *loop.cost.passes.log_error.tolist()]


def test_the_next_engine_begins_with_what_was_learnt_and_texts_stay_the_same(cache: Path) -> None:
    cold, said = started()
    assert "started from" not in said
    assert "started from" not in serve_and_end()
    (file,) = (cache / "learnt").iterdir()
    assert file.stat().st_size < 1 << 15
    engine, said = started()
    assert "passes learnt on" in said
    assert known(engine) != known(cold)
    learnt = known(engine)
    assert_same(plain_answers(REQUESTS), run(engine, REQUESTS))
    engine.forget()
    assert known(engine) == learnt, "as it began"
    assert "started from" not in started(replace(CONFIG, keep_learnt=False))[1]


def test_a_broken_file_is_told_and_left_out(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    serve_and_end()
    (file,) = (cache / "learnt").iterdir()
    data = file.read_bytes()
    one_bit = data[:40] + bytes([data[40] ^ 1]) + data[41:]
    for broken in (data[:-1], b"", b"x" * len(data), one_bit):
        file.write_bytes(broken)
        caplog.clear()
        assert "started from" not in started()[1]
        assert caplog.text.count(str(file)) == 1
    assert "started from" not in serve_and_end(), "and it is written anew"
    assert "started from" in started()[1]


def test_a_file_that_is_whole_but_not_ours_is_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    _, _ = started()
    keeper = auto.LearningKeeper("another key", "tiny")
    engine, _ = started()
    run(engine, REQUESTS)
    keeper.keep(engine.controller)
    data = LEARNT.read("another key")
    assert data is not None
    LEARNT.write("this key", data)
    for key, kept in (("this key", data), ("third", b"{}")):
        LEARNT.write(key, kept)
        caplog.clear()
        assert auto.LearningKeeper(key, "tiny").before is None
        assert caplog.text.count("is not used") == 1


def test_other_costs_or_drafters_have_files_of_their_own(cache: Path, tmp_path: Path) -> None:
    serve_and_end()
    other = tmp_path / "other.json"
    costs = json.loads(Path(STAIRCASE).read_text())
    costs["target"]["kv_token_s"] += 1e-9
    other.write_text(json.dumps(costs))
    assert "started from" not in serve_and_end(replace(CONFIG, profile=str(other)))
    assert len(list((cache / "learnt").iterdir())) == 2


def test_a_running_engine_keeps_what_it_learns_now_and_then(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "KEEP_EVERY_S", 0.0)
    engine, _ = started()
    run(engine, REQUESTS)
    assert not (cache / "learnt").exists(), "all requests came before anything was learnt"
    run(engine, [replace(REQUESTS[0], request_id="later")])
    assert len(list((cache / "learnt").iterdir())) == 1


def test_what_is_learnt_about_newer_weights_is_not_kept(cache: Path) -> None:
    """The next start has the weights of the files again."""
    engine, _ = started()
    run(engine, REQUESTS)
    renew(engine, lambda: None, "v2", "v2", {})
    (file,) = (cache / "learnt").iterdir()
    kept = file.read_bytes()
    run(engine, [replace(r, request_id=f"{r.request_id} newer") for r in REQUESTS])
    engine.close()
    assert file.read_bytes() == kept


@pytest.mark.parametrize("renewed", [False, True])
def test_an_engine_that_woke_keeps_what_it_learns_of_the_first_weights_only(
    renewed: bool, cache: Path, tmp_path: Path
) -> None:
    models = [tmp_path / "old", tmp_path / "new"]
    for seed, folder in enumerate(models):
        folder.mkdir()
        write_model(folder, seed=seed)
    costs = json.loads(Path(STAIRCASE).read_text())
    costs["drafters"] = {"suffix": costs["drafters"]["suffix"]}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    prompts, params = [(5, 9, 13, 7) * 5] * 4, replace(PARAMS, max_tokens=200)
    options = {"draft": "auto:suffix", "profile": str(tmp_path / "costs.json"), "backend": "reference"}
    with LLM(str(models[0]), num_rows=4, max_len=256, **options) as llm:
        llm.generate(prompts, params)
        if renewed:
            llm.update_weights(models[1], "newer")
        llm.release_memory()
        (file,) = (cache / "learnt").iterdir()
        kept = file.read_bytes()
        llm.resume_memory()
        llm.generate(prompts, params)
    assert (file.read_bytes() == kept) == renewed


def test_what_cannot_be_written_refuses_no_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's name on disk may be no text."""
    monkeypatch.setattr(auto, "KEEP_EVERY_S", 0.0)
    engine, _ = started()
    run(engine, REQUESTS)
    keeper = auto.LearningKeeper("key", "mod\udce8le")
    engine._keeper = keeper
    run(engine, [replace(REQUESTS[0], request_id="later")])
    engine.close()
    assert "what was learnt is not kept" in caplog.text


def test_the_number_of_files_is_bounded_and_old_ones_go_first(cache: Path) -> None:
    kept = KeptData("learnt")
    for index in range(MAX_KEPT + 5):
        kept.write(f"{index}", b"x")
    assert len(list((cache / "learnt").iterdir())) == MAX_KEPT
    assert kept.read(f"{MAX_KEPT + 4}") == b"x"


def test_files_are_listed_and_can_be_removed(cache: Path) -> None:
    serve_and_end()
    KeptData("learnt").write("broken", b"{")
    found = {model.name: model for model in kept_models() if model.name.startswith("learnt:")}
    assert "passes" in found["learnt:tiny"].note
    assert "broken" in next(m.note for name, m in found.items() if name != "learnt:tiny")
    found["learnt:tiny"].remove()
    assert "started from" not in started()[1]


def test_a_replay_begins_with_it_too(tmp_path: Path) -> None:
    serve_and_end()
    file = tmp_path / "trace.jsonl"
    assert "started from" in serve_and_end(replace(CONFIG, trace=str(file)))
    assert "passes learnt on" in read_head(file).begun_with
    steps = list(replay(file))
    assert len(steps) > 5
    for step in steps:
        assert (step.now.ks == step.then.ks).all()
        assert (step.now.drafters == step.then.drafters).all()
