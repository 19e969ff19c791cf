"""Programs that measure servers and models: lm-eval, guidellm, aiperf. Those that are installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.serve.conftest import Server

LONGEST_S = 240


def installed(module: str, script: str) -> str:
    path = Path(sys.executable).with_name(script)
    if importlib.util.find_spec(module) is None or not path.exists():
        pytest.skip(f"{script} is not installed")
    return str(path)


def test_lm_eval_scores_and_generates(server: Server) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model: Any = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="default",
        tokenizer_backend="remote",
        tokenized_requests=False,
        max_gen_toks=4,
    )
    pairs = [("the in", " er"), ("the", " cat"), ("", "the in")]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    found = model.loglikelihood(asked)
    assert all(logprob < 0 for logprob, _ in found)
    until = Instance("generate_until", {}, ("the", {"until": ["zzz"], "max_gen_toks": 4}), 0)
    assert isinstance(model.generate_until([until])[0], str)


def test_guidellm_runs_without_an_error(server: Server, tmp_path: Path) -> None:
    command = [installed("guidellm", "guidellm"), "benchmark", "--target", server.url, "--model", "default"]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"the {i}"}) + "\n" for i in range(8)))
    command += ["--data", str(data), "--profile", "concurrent", "--rate", "2", "--max-requests", "6"]
    command += ["--output-path", str(tmp_path), "--disable-console-interactive"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    totals = found["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)


def test_aiperf_runs_without_an_error(server: Server, tmp_path: Path) -> None:
    command = [installed("aiperf", "aiperf"), "profile", "--model", "default", "--url", server.url]
    command += ["--endpoint-type", "chat", "--streaming", "--concurrency", "2", "--request-count", "6"]
    command += ["--tokenizer", "builtin", "--synthetic-input-tokens-mean", "8", "--osl", "8", "--ui", "none"]
    command += ["--artifact-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
