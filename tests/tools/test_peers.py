from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGUFReader, LlamaFileType
from tools.peers import compare, ours, rows, table, timing
from tools.peers import install as installation
from tools.peers.install import install, python_of, requirements
from tools.peers.prepare import (
    alone_in,
    check_room,
    config_json,
    file_type,
    prompts_of,
    removed_at_end,
    unquantized,
)
from tools.peers.protocol import PeerAnswers, PeerSetting, Recorder, divergence, reply
from tools.peers.remote import PeerFailed, PeerProcess
from tools.peers.shape_gguf import write_shape
from tools.peers.speculation import PAIR, PAIR_STUDY, SPECULATION, with_pair

from paceline.backend.rope import inverse_frequencies
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.model.files.hf import config_from_json
from paceline.model.weights import load_model, load_tokenizer
from tests.tiny import tiny_config

if TYPE_CHECKING:
    from collections.abc import Sequence

TWO = rows.PeerWorkload("batch 2", 2, 10, 4)
PROMPTS = [[3, 5, 7, 11], [13, 17, 19, 23]]


# Rates -------------------------------------------------------------------------------------------


def test_decoding_is_timed_while_all_rows_decode():
    # The second row's first token comes at 2 s, the first row's last one at 4 s: 2 + 2 tokens in 2 s.
    found = timing.rate(TWO, [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]])
    assert found == timing.PeerRate(prefill=10.0, decode=2.0, whole=8 / 5)
    assert found.figure(TWO) == 2.0


def test_one_new_token_is_a_prefill():
    workload = rows.PeerWorkload("prefill", 1, 512, 1)
    found = timing.rate(workload, [[2.0]])
    assert found.decode is None
    assert found.figure(workload) == 256.0


@pytest.mark.parametrize("arrivals", [[[1.0, 2.0, 3.0, 4.0]], [[1.0] * 4, [1.0] * 3], [[], []]])
def test_missing_tokens_are_noticed(arrivals):
    with pytest.raises(ValueError, match="tokens"):
        timing.rate(TWO, arrivals)


def test_rows_that_never_decode_together_have_no_rate():
    assert timing.rate(TWO, [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]).decode is None


FIGURES = {"a": [10.0, 30.0, 20.0], "b": [5.0, 10.0, 10.0], "c": [None, 6.0, 8.0], "d": [None]}


def test_best_row_is_that_of_the_largest_median():
    assert timing.best(FIGURES, ("b", "c", "d")) == "b"
    assert timing.best(FIGURES, ("d", "unknown")) is None


def test_ratio_is_the_median_over_runs():
    found = timing.ratio(FIGURES, ("a",), ("b", "c"))
    assert (found.ours, found.theirs, found.median) == ("a", "b", 2.0)
    assert timing.ratio(FIGURES, ("a",), ("c",)).median == 3.75  # the failed run does not count
    assert timing.ratio(FIGURES, ("a",), ("d",)) is None


@pytest.mark.parametrize("study", [rows.of_file(s, "Q4_K") for s in (rows.DECODING, SPECULATION, PAIR_STUDY)])
def test_required_ratios_name_rows_and_workloads_that_exist(study):
    names = {row.name for row in study.rows}
    workloads = {w.name for w in rows.workloads((1, 16, 64), 128, 128, 512)} | {"one request"}
    assert len(names) == len(study.rows)
    assert {row.name for row in study.ours} <= names
    for required in study.required:
        assert {*required.ours, *required.theirs} <= names
        assert set(required.minimum) <= workloads
    assert all(row.form in rows.FORMS for row in study.rows)
    assert not any(rows.FILE in name for name in names)
    assert any("Q4_K" in name for required in study.required for name in required.theirs)


def test_a_required_ratio_is_reached_or_not():
    required = rows.RequiredRatio("x", ("a",), ("b",), {"batch 1": 2.0, "batch 16": 2.1})
    found = timing.ratio(FIGURES, required.ours, required.theirs)
    assert [timing.is_reached(required, w, found) for w in ("batch 1", "batch 16", "batch 64")] == [
        True,
        False,
        None,
    ]


# Environments ------------------------------------------------------------------------------------


def test_requirements_that_apply_and_are_wanted():
    requires = ["a>=1", "b[x,y]<2; python_version > '3'", "c; python_version < '3'", "d; extra == 'e'", "torch==1"]
    assert requirements(requires, frozenset({"torch"})) == ["a>=1", "b[x,y]<2"]


def test_failed_installation_says_why_and_is_tried_again(tmp_path):
    engine = rows.PeerEngine("broken", ("./no-such-folder",), options=("--no-index",))
    for _ in range(2):
        with pytest.raises(ConfigError, match="no-such-folder"):
            install(engine, tmp_path)
    assert not (tmp_path / "broken" / "installed").exists()


def test_an_engine_that_dies_is_installed_the_safe_way(tmp_path, monkeypatch):
    engine = rows.PeerEngine("fragile", ("x",), variables=(("WAY", "fast"),), safer=(("WAY", "safe"),))
    made = []

    def make(engine, folder):
        made.append(dict(engine.variables)["WAY"])
        (folder / engine.name).mkdir(exist_ok=True)
        (folder / engine.name / "installed").write_text(installation._stamp(engine))

    monkeypatch.setattr(installation, "_make", make)
    for _ in range(2):  # the second time there is nothing to do
        install(engine, tmp_path, lambda: False)
    assert made == ["fast", "safe"]
    install(replace(engine, name="sturdy"), tmp_path, lambda: True)
    assert made == ["fast", "safe", "fast"]


def test_llama_cpp_is_built_without_tiles_where_it_dies():
    (_, fast), (_, safe) = (*rows.LLAMA_CPP.variables, *rows.LLAMA_CPP.safely().variables)
    assert "amx" not in fast
    assert safe.startswith(fast)
    assert "-mno-amx-tile" in safe


def test_paceline_needs_no_environment(tmp_path):
    install(rows.PACELINE, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert python_of(rows.PACELINE, tmp_path) == sys.executable


# The model and the prompts -----------------------------------------------------------------------


def test_config_survives_the_way_through_a_folder():
    config = replace(tiny_config(head_dim=16), bos_id=1, eos_ids=(2, 3))
    assert config_from_json(config_json(config)) == replace(
        config, rope=replace(config.rope, original_context=config.max_context)
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_survive_it_too(family):
    config = replace(tiny_config(family, tie_embeddings=False), eos_ids=(2,))
    there = config_from_json(config_json(config))
    assert there == replace(config, rope=replace(config.rope, original_context=config.max_context))


@pytest.mark.parametrize("config", [tiny_config("mistral"), tiny_config(biases=frozenset({"attn_o"}))])
def test_what_cannot_be_written_is_refused(config):
    with pytest.raises(UnsupportedModel, match="only llama, qwen2, qwen3"):
        config_json(config)


def test_weights_survive_the_way_through_a_folder(model, tmp_path):
    here = load_model(model)
    there = load_model(unquantized(here, tmp_path))
    assert set(there.weights) == set(here.weights)
    assert all(np.array_equal(here.weights[n], there.weights[n]) for n in here.weights)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "F16"])
@pytest.mark.parametrize("facts", ["", "family=qwen3,tied=0,", "family=qwen2,"])
def test_shapes_are_written_as_gguf(tmp_path, kind, facts):
    shape = f"shape:{facts}vocab_size=300,num_layers=2,hidden_size=256,intermediate_size=512"
    write_shape(shape, tmp_path / "m.gguf", kind)
    here, there = load_model(shape), load_model(tmp_path / "m.gguf")
    assert there.config == replace(here.config, norm_eps=there.config.norm_eps)
    step = {"Q4_K": 0.07, "Q6_K": 0.016, "Q8_0": 0.005, "F16": 0.001}[kind]  # of evenly spread numbers
    for name, weights in here.weights.items():
        error = np.sqrt(np.square(there.weights[name] - weights).mean() / np.square(weights).mean())
        assert error < (step if weights.ndim == 2 else 1e-6), name
    assert load_tokenizer(there).encode("xy") == load_tokenizer(here).encode("xy")
    assert file_type(there) in (kind, "Q6_K")
    told = GGUFReader(tmp_path / "m.gguf").get_field("general.file_type")
    assert told is not None
    assert LlamaFileType(told.contents()).name.removesuffix("_M") == f"MOSTLY_{kind}"


def test_a_stretched_rope_is_written_with_its_factors(tmp_path):
    shape = "shape:llama-3.2-1b,num_layers=1,hidden_size=256,intermediate_size=256,vocab_size=300,max_context=64"
    write_shape(shape, tmp_path / "m.gguf", "Q8_0")
    here, there = load_model(shape).config, load_model(tmp_path / "m.gguf")
    angles = inverse_frequencies(there.config.rope, 64, there.weights["rope_factors"])
    assert np.allclose(angles, inverse_frequencies(here.rope, 64), rtol=1e-6)


def test_shapes_that_do_not_fit_their_type_are_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="Q8_0"):
        write_shape("shape:hidden_size=64,num_heads=2,num_kv_heads=1,head_dim=32", tmp_path / "m.gguf", "Q4_K")
    with pytest.raises(UnsupportedModel, match="window"):
        write_shape("shape:family=gemma3_text,window=64,hidden_size=256", tmp_path / "m.gguf", "Q8_0")


def test_a_model_that_a_disk_has_no_room_for_is_refused(tmp_path, monkeypatch):
    config = tiny_config("llama")
    check_room(tmp_path / "new", config, "F32")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"in Q8_0 takes 0.0 GB of .* --rows"):
        check_room(tmp_path, config, "Q8_0")


def test_a_second_comparison_in_a_folder_is_refused(tmp_path: Path) -> None:
    with alone_in(tmp_path), pytest.raises(ConfigError, match="another comparison works in"), alone_in(tmp_path):
        pass
    with alone_in(tmp_path):
        pass


@pytest.mark.parametrize("keep", [True, False])
def test_models_are_removed_at_the_end_and_logs_stay(tmp_path, model, keep):
    (tmp_path / "mine.gguf").touch()
    with pytest.raises(KeyboardInterrupt), removed_at_end(tmp_path, keep=keep):
        unquantized(load_model(model), tmp_path)
        for name in ("Q4_0.gguf", "Q8_0.part", "expected.npy", "one.log"):
            (tmp_path / name).touch()
        raise KeyboardInterrupt
    everything = ["Q4_0.gguf", "Q8_0.part", "expected.npy", "float32", "mine.gguf", "one.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == (everything if keep else ["mine.gguf", "one.log"])


def test_each_run_has_prompts_of_its_own(model, prompts):
    w = rows.PeerWorkload("batch 2", 2, 5, 1, runs_per_repeat=2)
    runs = prompts_of(load_model(model), str(prompts), [w], repeat=1)[w.name]
    assert [[len(ids) for ids in run] for run in runs] == [[5, 5], [5, 5]]
    with pytest.raises(ConfigError, match="1000 tokens"):
        prompts_of(load_model(model), str(prompts), [replace(w, prompt_tokens=1000)], repeat=1)


# Workers -----------------------------------------------------------------------------------------


class Uniform:
    """A peer that finds all of four tokens equally likely."""

    def describe(self) -> str:
        return "uniform"

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> PeerAnswers:
        recorder = Recorder(len(prompts), iter(range(100)).__next__)
        for row in range(len(prompts)):
            recorder.add(row, [row] * num_tokens)
        return recorder.answers()

    def logits(self, token_ids: Sequence[int], num_judged: int):
        return np.zeros((num_judged, 4), np.float32)


def test_replies(tmp_path):
    decoded = reply(Uniform(), {"do": "decode", "prompts": [[1], [2]], "num_tokens": 2})
    assert decoded == {"token_ids": [[0, 0], [1, 1]], "arrivals": [[1, 1], [2, 2]]}
    expected = np.log(np.array([[[0.25] * 4, [0.1, 0.1, 0.1, 0.7]]], np.float32))
    np.save(tmp_path / "e.npy", expected)
    judged = reply(Uniform(), {"do": "quality", "texts": [[1, 2, 3]], "expected": str(tmp_path / "e.npy")})
    assert judged["top1"] == 0.5
    assert judged["kl"] == pytest.approx(sum(p * np.log(4 * p) for p in (0.1, 0.1, 0.1, 0.7)) / 2, rel=1e-5)


def test_divergence_ignores_the_scale_of_logits():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert np.allclose(divergence(log_probs, logits + 100), 0.0, atol=1e-5)
    assert min(divergence(log_probs, 2 * logits)) > 0.01


def _command(model: Path, **options: object) -> list[str]:
    setting = {"file": str(model), "threads": 1, "max_rows": 2, "max_len": 64, "prefill_tokens": 64}
    loaded = json.dumps({"setting": setting, **options})
    return [sys.executable, "-m", "tools.peers.worker", "ours", loaded]


def _is_stopped(pid: int) -> bool:
    for _ in range(500):  # a signal takes its time
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def test_worker_computes_only_when_asked(model, tmp_path):
    here = ours.load(PeerSetting(str(model), 1, 2, 64, 64), "f32")
    with PeerProcess(_command(model, weights="f32"), tmp_path / "log", threads=1) as worker:
        pid = worker._process.pid
        question = {"do": "decode", "prompts": PROMPTS, "num_tokens": 6}
        for _ in range(2):
            assert sys.platform != "linux" or _is_stopped(pid)
            answer = worker.ask(question)
            assert answer["token_ids"] == here.decode(PROMPTS, 6).token_ids
        with pytest.raises(PeerFailed, match="KeyError"):
            worker.ask({"do": "nonsense"})
        assert worker.ask(question)["token_ids"] == answer["token_ids"]
        assert "native" in worker.description
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(PeerFailed, match="ended"):
        worker.ask(question)


def test_worker_that_cannot_load_says_why(model, tmp_path):
    with pytest.raises(PeerFailed, match="int3"):
        PeerProcess(_command(model, weights="int3"), tmp_path / "log", threads=1)


def test_worker_that_dies_is_noticed(tmp_path):
    with pytest.raises(PeerFailed, match="ended"):
        PeerProcess([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", threads=1)


# The whole ---------------------------------------------------------------------------------------


def test_comparison_of_our_own_rows(model, prompts, tmp_path, capsys):
    json_file = tmp_path / "out.json"
    flags = ["--rows", "paceline int4", "--batches", "1,2", "--repeat", "1", "--prompt-tokens", "5"]
    flags += ["--new-tokens", "4", "--prefill-tokens", "6", "--quality-prompts", "2", "--quality-tokens", "4"]
    flags += ["--threads", "1", "--engines", str(tmp_path / "e"), "--json", str(json_file)]
    assert compare.main(["--prompts", str(prompts), "--model", str(model), *flags]) == 0
    shown = capsys.readouterr().out
    assert "Paceline int4" in shown
    assert "failed" not in shown
    document = json.loads(json_file.read_text())
    (row,) = document["rows"]
    assert row["error"] is None
    assert {name: len(runs) for name, runs in row["tokens_per_s"].items()} == {
        "batch 1": 3,
        "batch 2": 1,
        "prefill": 3,
    }
    assert row["tokens_per_s"]["batch 2"][0]["decode"] > 0
    assert 0 <= row["kl_nats"] < 0.1
    assert document["ratios"][0]["best"] is None  # there was nobody to compare with


def test_comparison_with_speculation(model, prompts, tmp_path, capsys):
    json_file = tmp_path / "out.json"
    flags = ["--speculate", "3", "--rows", "ngram,paceline int8", "--repeat", "2", "--new-tokens", "6"]
    flags += ["--quality-prompts", "0"]
    flags += ["--threads", "1", "--engines", str(tmp_path / "e"), "--json", str(json_file)]
    assert compare.main(["--prompts", str(prompts), "--model", str(model), *flags]) == 0
    document = json.loads(json_file.read_text())
    known = {row["name"]: row for row in document["rows"] if row["error"] is None}
    assert {"Paceline int8", "Paceline int8, ngram:k=4"} <= set(known)
    assert all(len(row["tokens_per_s"]["one request"]) == 6 for row in known.values())
    assert "plain decoding" in capsys.readouterr().out


def test_an_interrupted_comparison_tells_the_runs_that_all_rows_have(
    model, prompts, tmp_path, capsys, monkeypatch
):
    measure_one, calls = compare._measure_one, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 5:  # each of three rows once, one of them again, then the signal
            raise KeyboardInterrupt
        measure_one(*args)

    monkeypatch.setattr(compare, "_measure_one", interrupted)
    json_file = tmp_path / "out.json"
    flags = ["--speculate", "3", "--rows", "ngram,suffix", "--repeat", "1", "--new-tokens", "6"]
    flags += ["--quality-prompts", "0", "--threads", "1"]
    flags += ["--engines", str(tmp_path / "e"), "--json", str(json_file)]
    assert compare.main(["--prompts", str(prompts), "--model", str(model), *flags]) == 0
    document = json.loads(json_file.read_text())
    assert [len(row["tokens_per_s"]["one request"]) for row in document["rows"]] == [1, 1, 1]
    assert "interrupted" in capsys.readouterr().err


def test_a_pair_drafts_in_our_rows(model, prompts, tmp_path):
    json_file = tmp_path / "out.json"
    flags = ["--speculate", "2", "--pair", str(model), "--rows", "int8 with draft", "--repeat", "1"]
    flags += ["--new-tokens", "6"]
    flags += ["--threads", "1", "--engines", str(tmp_path / "e"), "--json", str(json_file)]
    flags += ["--quality-prompts", "1", "--quality-tokens", "2"]
    assert compare.main(["--prompts", str(prompts), "--model", str(model), *flags]) == 0
    found = {row["name"]: row for row in json.loads(json_file.read_text())["rows"]}
    assert set(found) == {"Paceline int8 with draft model"}
    assert all(row["error"] is None and row["kl_nats"] < 0.1 for row in found.values())


def test_the_pair_is_one_file_in_both_engines():
    options = [with_pair(row.options, Path("/m.gguf")) for row in PAIR_STUDY.rows]
    assert not any(PAIR in str(value) for o in options for value in o.values())
    assert {"draft-model:model=/m.gguf", "/m.gguf"} <= {str(v) for o in options for v in o.values()}


def test_a_pair_needs_speculation(model, prompts, tmp_path, capsys):
    flags = ["--prompts", str(prompts), "--model", str(model), "--engines", str(tmp_path), "--pair", str(model)]
    assert compare.main(flags) == 1
    assert "--speculate" in capsys.readouterr().err


def test_rows_that_fail_are_reported_and_the_others_go_on(model, prompts, tmp_path, capsys, monkeypatch):
    good = rows.OURS[0]
    broken = replace(good, name="broken", options={"weights": "int3"})
    absent = rows.PeerEngine("absent", ("./no-such-folder",), options=("--no-index",))
    missing = replace(good, name="missing", engine=absent)
    monkeypatch.setattr(compare, "DECODING", replace(rows.DECODING, rows=(good, broken, missing)))
    flags = ["--batches", "1", "--repeat", "1", "--prompt-tokens", "5", "--new-tokens", "2", "--threads", "1"]
    flags += ["--prefill-tokens", "6", "--quality-prompts", "0", "--engines", str(tmp_path)]
    assert compare.main(["--prompts", str(prompts), "--model", str(model), *flags]) == 0
    shown = capsys.readouterr().out
    assert "missing: not installed: " in shown
    assert "int3" in shown
    assert any(line.startswith(good.name) and "failed" not in line for line in shown.splitlines())


@pytest.mark.parametrize(
    "flags",
    [
        ["--rows", "nothing"],
        ["--batches", "0"],
        ["--batches", "a"],
        ["--repeat", "0"],
        ["--threads", "0"],
        ["--json", "not/there.json"],
    ],
)
def test_bad_flags_are_refused(flags, model, prompts, tmp_path, capsys):
    first = ["--prompts", str(prompts), "--model", str(model), "--engines", str(tmp_path), "--rows", "paceline"]
    assert compare.main([*first, *flags]) == 1
    assert flags[0] in capsys.readouterr().err


def test_engines_are_installed_without_measuring(tmp_path, capsys):
    flags = ["--rows", "paceline int8", "--engines", str(tmp_path)]
    assert compare.main([*flags, "--install-only"]) == 0
    assert "Paceline int8: installed" in capsys.readouterr().out
    assert compare._arguments(flags).prompts == "builtin"


def test_table_shows_ratios_and_what_is_required(capsys):
    def measured(row: rows.PeerRow, decode: float) -> table.MeasuredRow:
        rate = timing.PeerRate(100.0, decode, 1.0)
        return table.MeasuredRow(row, rates={"batch 1": [rate, rate]}, kl=0.001, top1=0.99)

    shown = [measured(rows.OURS[0], 120.0), measured(rows.LLAMA_CPP_ROWS[0], 100.0)]
    table.print_tables(rows.DECODING, shown, [rows.PeerWorkload("batch 1", 1, 128, 128)])
    out = capsys.readouterr().out
    assert "1.20 (1.20-1.20) >= 1.15" in out
    assert "0.0010" in out
