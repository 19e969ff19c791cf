"""`paceline compare turns` in small: every arm on its cores, lines from runs, and what is said of them."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from paceline import cli
from paceline.bench.compare.arms import ALL, APART, CHOSEN, SHARED, TURNS, make_arms, shared_out
from paceline.bench.compare.results import Results
from paceline.bench.compare.turns import OverlapComparison, remarks
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.system import usable_cores
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.overlap import OverlappedLoop
from paceline.engine.scheduler import Limits
from paceline.engine.serial import SerialLoop

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.engine.engine import Engine

CORES = sorted(usable_cores())
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be shared out")


def recorded(path: Path, rates: Mapping[str, list[float]]) -> OverlapComparison:
    """A comparison of one cell that has been made."""
    results = Results(path, {}, {})
    for repeat, found in enumerate(zip(*rates.values(), strict=True)):
        arms = {
            arm: {"output_tokens_per_s": rate, "in_turns": 0.5} for arm, rate in zip(rates, found, strict=True)
        }
        results.once({"draft": "ngram", "size": 8, "repeat": repeat}, partial(dict, arms=arms))
    return OverlapComparison(dict.fromkeys(rates), results, [], SamplingParams(), ("ngram",), 4)  # type: ignore[arg-type]


def test_arms_are_compared_repeat_by_repeat_and_losses_are_told(tmp_path: Path) -> None:
    rates = {SHARED: [1.0, 2.0], ALL: [2.0, 4.0], APART: [1.0, 2.0], TURNS: [1.5, 3.0], CHOSEN: [1.2, 2.4]}
    lines = {x["arm"]: x for x in recorded(tmp_path / "t.json", rates).lines("ngram", 8)}
    assert lines[TURNS]["to_shared"] == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert lines[TURNS]["to_all"]["median"] == 0.75
    assert lines[CHOSEN]["to_better"]["median"] == pytest.approx(0.8)
    told = remarks(list(lines.values()))
    assert [said.rpartition(" at ")[2] for said in told] == [
        *("none of them", "none of them", "ngram x8 (0.75)", "ngram x8 (0.80)")
    ]


def test_only_auto_is_left_to_the_controller_unless_all_are(tmp_path: Path) -> None:
    turns = recorded(tmp_path / "t.json", {SHARED: [1.0]})
    assert [turns.draft_of(arm, "ngram") for arm in (TURNS, CHOSEN)] == ["ngram:k=4", "auto:ngram"]
    free = OverlapComparison(turns.arms, turns.results, [], turns.params, ("ngram",), None)
    assert free.draft_of(TURNS, "ngram") == "auto:ngram"


@two_cores
def test_arms_have_the_cores_and_the_loop_they_are_named_for(model: Path) -> None:
    arms = make_arms(shared_out(EngineConfig(model=str(model), limits=Limits(num_rows=2, max_len=64))))

    def where(engine: Engine) -> tuple[set[int], type, Any]:
        return os.sched_getaffinity(0), type(engine.loop), engine.target.decoder

    found = {name: arm.use(f"draft-model:model={model},k=2", where) for name, arm in arms.items()}
    assert found.keys() == {SHARED, ALL, APART, TURNS, CHOSEN}
    assert all(cores == set(CORES[:-1] if name == SHARED else CORES) for name, (cores, _, _) in found.items())
    assert {name for name, (_, loop, _) in found.items() if loop is OverlappedLoop} == {TURNS}
    assert {loop for _, loop, _ in found.values()} == {OverlappedLoop, SerialLoop}
    few = {id(found[name][2]) for name in (SHARED, APART, TURNS, CHOSEN)}
    assert len(few) == 1, "weights are shared"
    assert id(found[ALL][2]) not in few


def test_devices_that_are_no_cores_and_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="give the drafter cores"):
        shared_out(EngineConfig(draft_device="cuda:1"))
    if len(CORES) > 1:
        with pytest.raises(ConfigError, match="--threads"):
            shared_out(EngineConfig(threads=1))
    for bad in ("0", "x", "99"):
        with pytest.raises(ConfigError, match="--k"):
            cli._main(["compare", "turns", "--prompts", "none", "--k", bad])


@two_cores
def test_the_command_ends_in_a_table_and_goes_on_where_it_stopped(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    out = tmp_path / "t.json"
    command = ["compare", "turns", "--prompts", str(prompts), "--model", str(model), "--json", str(out)]
    command += ["--draft", f"draft-model:model={model}", "--k", "2", "--sizes", "1,2", "--repeat", "2"]
    tables = []
    for _ in range(2):
        assert cli.main([*command, "--max-tokens", "6", "--limit", "2"]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1], "nothing was measured again"
    document = json.loads(out.read_text())
    assert document["settings"]["draft_device"] == f"cpu:{CORES[-1]}"
    assert len(document["runs"]) == 2 * 2
    assert len(document["summary"]) == 5 * 2
    assert {r["arms"][TURNS]["in_turns"] > 0 for r in document["runs"] if r["size"] == 2} == {True}
    assert not any(r["arms"][arm]["in_turns"] for r in document["runs"] for arm in (SHARED, APART, ALL))
