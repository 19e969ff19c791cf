"""A head in two engines: what is counted, what vLLM is given. vLLM itself is not run here."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tools.peers import acceptance
from tools.peers.acceptance import PeerAcceptance, document, whole_passes
from tools.peers.prepare import unquantized_head

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

ANSWER = {"token_ids": [[1, 2, 3, 4, 5, 6, 7]], "arrivals": [[0.1, 0.2, 0.2, 0.2, 0.3, 0.4, 0.4]]}


def test_prefill_and_the_cut_pass_do_not_count():
    assert whole_passes(ANSWER["arrivals"][0]) == [3, 1]
    assert whole_passes([0.1, 0.2]) == []


def _kept(name: str, *passes: list[int]) -> PeerAcceptance:
    return PeerAcceptance(name, [[sum(p)] for p in passes], list(passes))


def test_figures():
    found = document(_kept("a", [3, 1], [2, 2]), _kept("b", [3, 1], [4]), num_drafts=3)
    assert (found["prompts"], found["same_text"], found["same_passes"]) == (2, 2, 1)
    assert found["ratio"] == pytest.approx((8 / 3) / 2)
    assert found["engines"]["a"] == {
        "passes": 4,
        "acceptance_length": 2.0,
        "kept_per_position": [0.75, 0.25, 0.0],
    }


def test_answers_of_one_pass_are_too_short():
    with pytest.raises(ConfigError, match="--new-tokens"):
        document(_kept("a", []), _kept("b", []), num_drafts=1)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "trained"
    folder.mkdir()
    tensors = {
        "fc.weight": np.array([[127, -64], [1, 0]], np.int8),
        "fc.weight_scale": np.array([[0.5], [2.0]], np.float32),
        "norm.weight": np.array([1.0, 0.5], np.float16),
        "d2t": np.array([0, 3]),
        "t2d": np.array([True, False]),
    }
    save_file(tensors, folder / "model.safetensors")
    values = {"dtype": "float16", "quantization_config": {"format": "int-quantized"}, "norm_output": True}
    values |= {"draft_own_tokens": True}  # which others do not know
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_head_is_written_in_float32(head: Path, tmp_path: Path):
    folder = unquantized_head(head, tmp_path / "work")
    tensors = load_file(folder / "model.safetensors")
    assert {name: str(t.dtype) for name, t in tensors.items()} == {
        "fc.weight": "float32",
        "norm.weight": "float32",
        "d2t": "int64",
        "t2d": "bool",
    }
    assert tensors["fc.weight"].tolist() == [[63.5, -32.0], [2.0, 0.0]]
    assert json.loads((folder / "config.json").read_text()) == {"dtype": "float32", "norm_output": True}


class FakeWorker(AbstractContextManager):
    """Answers every question alike."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(question)
        return ANSWER


def test_both_are_asked_the_same(model, prompts, head, tmp_path, capsys, monkeypatch):
    workers, options = {}, {}

    def start(_engine, module, given, *_):
        options[module] = given
        return workers.setdefault(module, FakeWorker())

    monkeypatch.setattr(acceptance, "_worker", start)
    monkeypatch.setattr(acceptance, "install", lambda *_: None)
    flags = ["--prompts", str(prompts), "--model", str(model), "--draft", f"peagle:model={head},k=2"]
    flags += ["--limit", "2", "--new-tokens", "7", "--threads", "1", "--engines", str(tmp_path)]
    assert acceptance.main([*flags, "--json", str(tmp_path / "out.json")]) == 0
    assert workers["ours"].asked == workers["vllm_cpu"].asked
    assert len(workers["ours"].asked) == 2
    speculation = options["vllm_cpu"]["speculation"]
    assert (speculation["method"], speculation["parallel_drafting"]) == ("eagle3", True)
    copy = speculation["model"]
    assert copy != str(head)
    assert (speculation["num_speculative_tokens"], options["ours"]["draft"]) == (2, f"peagle:model={copy},k=2")
    assert json.loads((tmp_path / "out.json").read_text())["ratio"] == 1.0
    assert "of 2 prompts 2 have the same text" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--draft", "ngram"],
        ["--draft", "off"],
        ["--limit", "0"],
        ["--new-tokens", "2"],
        ["--json", "not/there.json"],
    ],
)
def test_bad_flags_are_refused(flags, prompts, capsys):
    assert acceptance.main(["--prompts", str(prompts), *flags]) == 1
    assert flags[0] in capsys.readouterr().err
