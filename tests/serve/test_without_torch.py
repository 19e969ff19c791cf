"""Everything that serves works where torch is not installed, and what needs it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.serve.conftest import COMMAND, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Python imports `sitecustomize` when it starts, so the engine's own child processes lack torch, too.
BLOCK = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables under which a Python process and its children cannot import torch."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def python(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, input=stdin, capture_output=True, text=True, check=False, timeout=120, env=environment
        )

    return run


def test_the_block_holds(python):
    done = python(sys.executable, "-c", "import torch.nn")
    assert done.returncode != 0
    assert "No module named 'torch" in done.stderr


@pytest.mark.parametrize("draft", ["auto", "off", "ngram:k=4"])
def test_the_native_backend_generates(python, model, draft):
    code = (
        "import sys; from paceline import LLM, SamplingParams\n"
        f"with LLM({str(model)!r}, draft={draft!r}, threads=1, kv_tokens=1024) as llm:\n"
        "    print(len(llm.generate(['the in on'], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids))\n"
        "    assert 'torch' not in sys.modules"
    )
    done = python(sys.executable, "-c", code)
    assert done.stdout == "6\n", done.stderr


def test_the_terminal_talks(python, model):
    done = python(*COMMAND, "chat", "--model", str(model), "--draft", "off", "--max-tokens", "4", stdin="hello\n")
    assert done.returncode == 0, done.stderr


def test_the_server_answers(environment, model):
    with running(model, env=environment) as server, server.client() as client:
        answer = client.post("/v1/completions", json={"model": model.name, "prompt": "the", "max_tokens": 4})
        assert answer.status_code == 200, answer.text


def test_bench_measures(python, model, tmp_path):
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.json"
    prompts.write_text(json.dumps({"question_id": 1, "category": "any", "turns": ["the in"]}))
    flags = [
        "--prompts",
        str(prompts),
        "--json",
        str(results),
        "--max-tokens",
        "4",
        "--warmup",
        "0",
        "--threads",
        "1",
    ]
    done = python(*COMMAND, "bench", "--model", str(model), "--draft", "off", "--threads", "1", *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(results.read_text())["backend"]["threads"] == 1


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        (["generate", "the", "--backend", "reference"], "the reference backend needs torch"),
        (["train", "eagle3"], "`paceline train eagle3` needs PyTorch"),
        (["train", "peagle"], "`paceline train peagle` needs PyTorch"),
        (["train", "draft-model"], "`paceline train draft-model` needs PyTorch"),
        (["train", "features"], "`paceline train features` needs PyTorch"),
    ],
)
def test_what_needs_torch_says_how_to_install_it(python, model, words, subject):
    options = ["--model", str(model)] if words[0] == "generate" else []
    done = python(*COMMAND, *words, *options)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {subject}: pip install 'paceline[torch]'"
