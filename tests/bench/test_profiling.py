"""What `paceline profile` draws, and what it measures on a data set."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from paceline import cli
from paceline.bench.pictures import draw_profile
from paceline.bench.step_table import WatchedK
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TableCost, TargetCost
from paceline.control.files import Profile, read_profile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.core.nouns import Batch

PASS = Curve.of([1, 64], [0.01, 0.02])
DRAFTING = Curve.of([1, 64], [0.001, 0.002])


def test_drafters_that_cost_nothing_are_left_out_of_the_picture(tmp_path: Path) -> None:
    costs = DraftCost(()), DraftCost((DRAFTING,)), DraftCost((DRAFTING, DRAFTING))
    profile = Profile(MeasuredCost(TargetCost(PASS), costs), ("suffix", "shallow", "deep"))
    draw_profile(profile, tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    for label, there in (("suffix", False), ("shallow, 1 deep", True), ("deep, 1 deep", True), ("2 deep", True)):
        assert (label in text) == there, label


@pytest.fixture
def profiled(model: Path, prompts: Path, tmp_path: Path) -> Callable[..., Path]:
    def run(*options: str) -> Path:
        out = tmp_path / "out.json"
        usual = ["--model", str(model), "--prompts", str(prompts), "--out", str(out), "--max-len", "200"]
        assert cli.main(["profile", *usual, "--quick", "--threads", "1", *options]) == 0
        return out

    return run


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Rows that were asked for in a cell, and rows that one of its steps had."""
    seen = set()
    observe = WatchedK.observe

    def noted(watched: WatchedK, batch: Batch, *rest: Any) -> tuple[()]:
        seen.add((watched.num_rows, len(batch.rows)))
        return observe(watched, batch, *rest)

    monkeypatch.setattr(WatchedK, "observe", noted)
    return seen


def test_whole_steps_are_measured_on_a_data_set(
    profiled: Callable[..., Path], steps: set[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = profiled(
        *("--draft", "ngram:min=1", "--format", "dynamic-sd", "--batch-sizes", "4,1", "--ks", "3,1"),
        *("--temperature", "0.5", "--max-tokens", "24"),
    )
    written = json.loads(out.read_text())
    assert list(written["batch_stats"]) == ["1", "4"]
    assert all(list(by_k) == ["0", "1", "3"] for by_k in written["batch_stats"].values())
    assert (written["is_online"], written["warmup_steps"], written["max_num_speculative_tokens"]) == (False, 10, 3)
    assert len(written["acceptance_rate_per_pos"]) == 3
    profile = read_profile(out)
    assert isinstance(profile.cost, TableCost)
    assert (profile.cost.seconds(4, 0.0) > 0).all()
    assert {(1, 1), (4, 4)} <= steps
    shown = capsys.readouterr().out
    assert "ms of a step" in shown
    assert "warmup_steps (10) is not used: " in shown
    assert cli.main(["profile", "--show", str(out)]) == 0
    assert capsys.readouterr().out == shown.partition("written to")[0]


def test_parts_and_acceptance_are_measured_together(
    profiled: Callable[..., Path], steps: set[tuple[int, int]]
) -> None:
    profile = read_profile(profiled("--draft", "draft-model:layers=1", "--max-tokens", "24"))
    assert isinstance(profile.cost, MeasuredCost)
    assert len(profile.accepted_at) == 8
    assert all(a >= b for a, b in zip(profile.accepted_at, profile.accepted_at[1:], strict=False))
    assert profile.accepted_at[0] > 0
    assert max(rows for _, rows in steps) > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "dynamic-sd"], "measures one drafter"),
        (["--format", "dynamic-sd", "--draft", "off"], "measures one drafter"),
        (["--format", "dynamic-sd", "--draft", "auto:ngram"], "measures one drafter"),
        (
            ["--format", "dynamic-sd", "--draft", "ngram", "--batch-sizes", "0,4"],
            "must be numbers between",
        ),
        (["--format", "dynamic-sd", "--draft", "ngram", "--batch-sizes", "many"], "--batch-sizes must be numbers"),
        (["--format", "dynamic-sd", "--draft", "ngram", "--ks", "17"], "--ks must be numbers between"),
        (["--format", "dynamic-sd", "--draft", "ngram", "--plot", "x.png"], "--plot draws"),
        (["--limit", "0"], "--limit must be between"),
        (["--format", "other"], "invalid choice"),
        (["--show", "nowhere.json"], "cannot be read as a profile"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_loads(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.engine.assembly.build.load", lambda *_: pytest.fail("it is loading"))
    assert cli.main(["profile", *options]) == 2
    assert said in capsys.readouterr().err
