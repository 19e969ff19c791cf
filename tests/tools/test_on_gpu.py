"""The prepared run on a GPU: all phases over tiny shapes on this machine, and what holds them together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tools.gpu import pack, phase, run
from tools.gpu.compile_first import trace_checks, trace_models
from tools.gpu.engines import Window, answer_all, load_target, make_engine, make_requests
from tools.gpu.floors import pass_needs
from tools.gpu.record import Record
from tools.gpu.recorded import chances_of, oracle
from tools.gpu.report import table
from tools.gpu.right import never_launched
from tools.gpu.sizes import DRY, FULL, SEED_ACCEPTANCE
from tools.gpu.sweep import sweep_variants
from tools.gpu.tracing import H100_PROCESSORS, META, launches

from paceline.backend.cuda import attention, kernel_launch
from paceline.backend.cuda.tiles import TILES, tile_variant
from paceline.control.fixed import FixedK

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 << 10  # of one program on sm_90
ON_HOST: Any = SimpleNamespace(device=torch.device("cpu"))


def started(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run the tool as its script does; return its results."""
    out = arguments[arguments.index("--out") + 1]
    command = [sys.executable, "-m", "tools.gpu.run", *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, **(env or {})}, check=True, timeout=300
    )
    return json.loads((Path(out) / "results.json").read_text(encoding="utf-8"))


# The dry run ---------------------------------------------------------------------------------------


def test_every_phase_runs_on_a_host(tmp_path):
    found = started(
        *("--dry", "--phases", ",".join(phase.PHASES), "--out", str(tmp_path)),
        env={"PACELINE_CACHE": str(tmp_path / "cache"), "PYTHONWARNINGS": "ignore"},
    )
    phases = found["phases"]
    assert list(phases) == list(phase.PHASES)
    assert {name: p["errors"] for name, p in phases.items() if p["errors"]} == {}
    assert not any(p["left_out"] for p in phases.values())
    results = {name: p["results"] for name, p in phases.items()}
    assert results["ceilings"]["read_bytes_per_s"] > 0
    assert all(family["right"] for family in results["right"]["float64"].values())
    assert results["text"]["different_answers"] == 0
    assert len(results["text"]["ways"]) == 2 * 2 * 4 - 1
    last = str(DRY.batches[-1])
    assert {"off", "k0", "k1", "k3", "auto"} <= results["speculation"].keys()
    assert results["speculation"]["k3"][last]["tokens_per_step_and_row"] > 1.1
    assert results["plain"]["engine"]["exact"][last]["tpot_ms"] > 0
    assert {"plain loop", "continuous batching", "assisted generation"} <= results["peers"].keys()
    text = (tmp_path / "table.txt").read_text(encoding="utf-8")
    assert "DRY RUN" in text
    assert "0 answers differ" in text
    assert sum(path.is_file() for path in tmp_path.iterdir()) <= 8


def test_phases_have_processes_of_their_own(tmp_path):
    found = started("--dry", "--apart", "--phases", "ceilings", "--out", str(tmp_path))
    assert found["phases"]["ceilings"]["ended"] == "well"
    assert found["phases"]["ceilings"]["results"]["matmul_per_s"] > 0


def test_a_phase_that_fails_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "GRACE_S", 0.2)
    monkeypatch.setattr(run, "LEAST_S", 0.0)
    out = tmp_path / "out"
    prepared = run.PreparedRun(out, "cpu", dry=True, apart=False)

    def behave(asked):
        if asked.name == "ceilings":
            return fail(asked)
        if asked.name == "right":
            return "by force: it ran past its limit"
        return run_well(asked)

    def fail(asked):
        Record(asked.name, asked.folder / f"{asked.name}.json", 1.0).attempt("part", lambda: 1 / 0)
        return "well"

    def run_well(asked):
        Record(asked.name, asked.folder / f"{asked.name}.json", 1.0).put(tokens=3)
        return "well"

    monkeypatch.setattr(run, "_run_here", behave)
    prepared.go(["ceilings", "right", "text"], dict.fromkeys(phase.PHASES, 1.0), 30.0)
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))["phases"]
    assert "ZeroDivisionError" in found["ceilings"]["errors"]["part"]
    assert found["right"] == {
        "errors": {"start": "it has written nothing"},
        "ended": "by force: it ran past its limit",
    }
    assert found["text"]["results"] == {"tokens": 3}


def test_a_phase_is_ended_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "GRACE_S", 0.0)
    asked = phase.PhaseRun("ceilings", tmp_path, "cpu", 0.01, True, frozenset())
    assert run._run_apart(asked).startswith("by force")


def test_without_time_a_phase_is_left_out(tmp_path):
    prepared = run.PreparedRun(tmp_path, "cpu", dry=True, apart=False)
    prepared.go(["ceilings"], dict(phase.PHASES), 1.0)
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert found["phases"]["ceilings"]["left_out"]
    assert "before it began" in table(found)


@pytest.mark.parametrize(
    "arguments", [["--phases", "right,wrong"], ["--limit", "wrong=3"], ["--limit", "right=x"]]
)
def test_unknown_phases_are_refused(arguments, capsys):
    assert run.main(arguments) == 2
    assert "error: " in capsys.readouterr().err


# Records -------------------------------------------------------------------------------------------


def test_a_record_holds_what_was_found_before_an_error(tmp_path):
    record = Record("text", tmp_path / "text.json", 60.0)
    record.put("ways", "off", different=0)
    assert record.attempt("bad", lambda: {}["nothing"]) is None
    assert record.attempt("good", lambda: 3) == 3
    record.put("ways", "auto", different=1)
    found = json.loads(record.path.read_text(encoding="utf-8"))
    assert found["results"]["ways"] == {"off": {"different": 0}, "auto": {"different": 1}}
    assert found["errors"]["bad"].startswith("KeyError: 'nothing' | test_on_gpu.py:")


def test_after_the_limit_and_after_a_broken_device_parts_are_left_out(tmp_path):
    def breaks():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    late = Record("text", tmp_path / "late.json", 0.0)
    assert late.attempt("part", sleep, 0) is None
    broken = Record("text", tmp_path / "broken.json", 60.0)
    broken.attempt("first", breaks)
    broken.attempt("second", lambda: 1)
    assert late.left_out == ["part"]
    assert broken.left_out == ["second"]


# Kernels -------------------------------------------------------------------------------------------


def test_the_checks_launch_every_variant_of_the_table():
    launched = {variant.name for variant in trace_checks(FULL, H100_PROCESSORS).values()}
    assert never_launched(launched) == []
    assert never_launched(launched - {"keep_while_chosen"}) == ["keep_while_chosen"]


def test_a_models_kernels_are_found_without_a_device():
    names = {variant.name for variant in trace_models(DRY, H100_PROCESSORS, with_pairs=False).values()}
    for text in ("product plain bf16", "product fp8 bf16", "attend_parts", "heads bf16", "draft_ids"):
        assert any(text in name for name in names), text


def test_a_sweep_times_what_kernels_use_and_nothing_too_large():
    heads, both = FULL.heads[0], frozenset({"N", "K"})
    used = {tile_variant("bf16", tile, way, bias=False, aligned=both) for way in TILES for tile in TILES[way]}
    found = set(sweep_variants(FULL).values())
    assert used < found
    code = [(dict(variant.constants), variant.options()) for variant in found]
    for rows in (attention.FEW_ROWS, attention.TILE_ROWS):
        usual = attention._attend_variant("bf16", "bf16", *heads, rows, frozenset({"query_stride"}))
        assert (dict(usual.constants), usual.options()) in code
    for sizes, options in code:
        attends = "KEYS" in sizes
        width = 2 * sizes["BLOCK_D"] if attends else sizes["BLOCK_N"] + sizes["BLOCK_T"]
        step = sizes["KEYS" if attends else "BLOCK_K"]
        assert 2 * step * width * options["num_stages"] <= SHARED_BYTES


def test_tracing_launches_nothing_and_ends():
    before = kernel_launch.launch
    with launches():
        assert kernel_launch.launch is not before
        assert kernel_launch.uses_kernels(torch.empty(1, device=META))
    assert kernel_launch.launch is before


COMPILES = """
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from types import SimpleNamespace
driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
from tools.gpu.compile_first import compile_variant
from paceline.backend.cuda.kernel_launch import variant_table
for name in ("finish bf16 4 bias", "keep_while_chosen"):
    compile_variant(variant_table()[name])
"""


def test_variants_compile_as_a_launch_would(tmp_path):
    pytest.importorskip("triton", reason="Triton compiles the kernels")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILES], cwd=ROOT, env=env, check=True, timeout=120)
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


# Figures -------------------------------------------------------------------------------------------


def test_the_needs_of_a_pass_of_eight_billion_weights():
    from tools.gpu.bench import load_decoder

    decoder = load_decoder(FULL.model, FULL.weights, META)
    kv = decoder.new_kv(1)
    assert kv.bytes_per_token == 2 * 32 * 8 * 128 * 2
    one, many = (pass_needs(decoder, kv, rows, 1, 512) for rows in (1, 64))
    assert one.num_bytes == pytest.approx(15.0e9, rel=0.01)
    assert many.num_bytes - one.num_bytes == 63 * 513 * kv.bytes_per_token
    assert one.operations == pytest.approx(2 * 7.5e9, rel=0.02)
    assert pass_needs(decoder, kv, 1, 2048, 0, chosen=1).operations < 2048 * one.operations


def test_a_stall_counts_for_itself():
    window = Window(2, (0.01, 0.011, 0.5, 0.01), (2, 4, 2, 2), 3, 6, (0, 4), 0.0, 0.0, 0.0)
    found = window.summary()
    assert (found["steps"], found["stalls"]) == (3, 1)
    assert found["tpot_ms"] == pytest.approx(2 * 31 / 8)
    assert found["stalled_ms"] == pytest.approx(500)


def test_chances_are_shares_of_the_drafts_before():
    assert chances_of((0.5, 0.25, 0.2)) == pytest.approx([0.5, 0.5, 0.8])


def test_a_recording_beside_a_head_is_kept_as_often_as_asked(tmp_path):
    config, loaded = load_target(ON_HOST, DRY.model, "f64")
    requests = make_requests(24, 8, 60, DRY.vocab_size)
    plain = answer_all(make_engine(config, loaded, "off", 24, 68), requests, 24)
    spec = oracle(tmp_path / "plain.jsonl", plain, f"eagle3[model={DRY.head}]", 5, SEED_ACCEPTANCE)
    engine = make_engine(config, loaded, spec, 24, 68)
    (name,) = engine.drafting.drafters
    engine.controller = FixedK(name, 3)
    answers = answer_all(engine, requests, 24)
    assert all(np.array_equal(a, b) for a, b in zip(answers, plain, strict=True))
    counts = engine.stats().drafters[name]
    shares = [kept / tested for kept, tested in zip(counts.accepted_at, counts.verified_at, strict=True)]
    assert shares == pytest.approx(SEED_ACCEPTANCE[:3], abs=0.07)
    assert engine.stats().drafter_failures == 0


# The pack ------------------------------------------------------------------------------------------


def wheel(folder: Path, *requires: str) -> Path:
    path = folder / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = ["Metadata-Version: 2.1", "Name: some", *(f"Requires-Dist: {text}" for text in requires)]
        archive.writestr("some-1.0.dist-info/METADATA", "\n".join(lines) + "\n\nabout\n")
    return path


def test_a_wheels_needs_are_those_on_linux_without_extras(tmp_path):
    path = wheel(
        tmp_path,
        *("anyio (>=3.6)", "click>=7", 'httpx; extra == "full"', "colorama; sys_platform == 'win32'"),
        *("cffi; implementation_name == 'pypy'", 'tomli>=2; python_version < "3.11"'),
    )
    assert pack.needs_of(path) == ["anyio (>=3.6)", "click>=7"]


def test_needed_packages_are_those_that_an_image_with_pytorch_lacks():
    names = {pack.normal(text) for text in pack.needed(ROOT)}
    assert {"gguf", "msgspec", "pyzmq", "starlette", "uvicorn"} <= names
    assert not names & {"numpy", "tokenizers", "huggingface-hub"}
    assert pack.normal("huggingface_hub>=0.34") == "huggingface-hub"


def test_a_light_wheel_has_no_drafters(tmp_path):
    path = wheel(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("paceline/engine.py", "one = 1\n")
        archive.writestr("paceline/drafters/eagle3/model.safetensors", b"weights")
    folder = tmp_path / "light"
    folder.mkdir()
    pack.lighten(path, folder)
    with zipfile.ZipFile(folder / path.name) as light:
        assert light.namelist() == ["some-1.0.dist-info/METADATA", "paceline/engine.py"]
        assert light.read("paceline/engine.py") == b"one = 1\n"


def test_without_a_fitting_python_the_pack_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHON312", "/nowhere/python3.12")
    monkeypatch.setattr(pack.shutil, "which", lambda name: None)
    monkeypatch.setattr(pack.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(pack.Path, "home", lambda: tmp_path)
    assert pack.pack(tmp_path / "there", ROOT) == 1
    assert "PYTHON312=/path/to/python3.12" in capsys.readouterr().err


def test_a_pack_has_what_it_needs_and_may_not_be_too_large(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pack, "find_python", lambda: Path(sys.executable))
    monkeypatch.setattr(pack, "build_wheel", lambda python, root: wheel(tmp_path))
    monkeypatch.setattr(pack, "fetch_missing", lambda python, requirements, wheels: iter(()))
    folder = tmp_path / "there"
    assert pack.pack(folder, ROOT) == 0
    assert {p.name for p in folder.iterdir()} == {"wheels", "tools", "run", "COMMIT"}
    assert (folder / "tools" / "gpu" / "run.py").exists()
    assert "MiB  in all" in (text := capsys.readouterr().out)
    assert "bash DIR/run" in text
    monkeypatch.setattr(pack, "MAX_BYTES", 1 << 10)
    assert pack.pack(folder, ROOT) == 1
    assert "are more than" in capsys.readouterr().err


def test_a_folder_with_other_files_is_not_packed_over(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert pack.pack(tmp_path, ROOT) == 1
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()
