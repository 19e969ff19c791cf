"""`paceline compare overlap` in small: each way to share cores, rows from runs, and the losses named."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from paceline import cli
from paceline.bench.scenarios.core_sharing import (
    ALL_CORES,
    AUTO_LOOP,
    OVERLAPPED,
    SEPARATE,
    SHARED,
    all_sharings,
    split_cores,
)
from paceline.bench.scenarios.overlap_loops import OverlapComparison, losses
from paceline.bench.scenarios.result_file import ResultFile
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.system import usable_cores
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.overlapped_loop import OverlappedLoop
from paceline.engine.request_table import Limits
from paceline.engine.step import SerialLoop

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.engine.engine import Engine

CORES = sorted(usable_cores())
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be shared out")


def recorded(path: Path, rates: Mapping[str, list[float]]) -> OverlapComparison:
    """A comparison of one cell that has been made."""
    results = ResultFile(path, {}, {})
    for repeat, found in enumerate(zip(*rates.values(), strict=True)):
        sharings = {
            name: {"output_tokens_per_s": rate, "overlapped_share": 0.5}
            for name, rate in zip(rates, found, strict=True)
        }
        results.once({"draft": "ngram", "size": 8, "repeat": repeat}, partial(dict, sharings=sharings))
    ways = dict.fromkeys(rates)
    return OverlapComparison(ways, results, [], SamplingParams(), ("ngram",), 4, (2, 8, 32), 16, 5)  # type: ignore[arg-type]


def test_ways_are_compared_repeat_by_repeat_and_losses_are_named(tmp_path: Path) -> None:
    rates = {
        SHARED: [1.0, 2.0],
        ALL_CORES: [2.0, 4.0],
        SEPARATE: [1.0, 2.0],
        OVERLAPPED: [1.5, 3.0],
        AUTO_LOOP: [1.2, 2.4],
    }
    rows = {x["sharing"]: x for x in recorded(tmp_path / "t.json", rates).rows("ngram", 8)}
    assert rows[OVERLAPPED]["to_shared"] == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert rows[OVERLAPPED]["to_all"]["median"] == 0.75
    assert rows[AUTO_LOOP]["to_better"]["median"] == pytest.approx(0.8)
    sentences = losses(list(rows.values()))
    assert [s.rpartition(" at ")[2] for s in sentences] == [
        *("none of them", "none of them", "ngram x8 (0.75)", "ngram x8 (0.80)")
    ]


def test_only_auto_is_left_to_the_controller_unless_all_are(tmp_path: Path) -> None:
    comparison = recorded(tmp_path / "t.json", {SHARED: [1.0]})
    assert [comparison.draft_of(name, "ngram") for name in (OVERLAPPED, AUTO_LOOP)] == ["ngram:k=4", "auto:ngram"]
    free = replace(comparison, k=None)
    assert free.draft_of(OVERLAPPED, "ngram") == "auto:ngram"


@two_cores
def test_ways_have_the_cores_and_the_loop_they_are_named_for(model: Path) -> None:
    config = EngineConfig(model=str(model), limits=Limits(num_rows=2, max_len=64))
    sharings = all_sharings(split_cores(config))

    def where(engine: Engine) -> tuple[set[int], type, Any]:
        return os.sched_getaffinity(0), type(engine.loop), engine.target.decoder

    found = {name: sharing.use(f"draft-model:model={model},k=2", where) for name, sharing in sharings.items()}
    assert found.keys() == {SHARED, ALL_CORES, SEPARATE, OVERLAPPED, AUTO_LOOP}
    assert all(cores == set(CORES[:-1] if name == SHARED else CORES) for name, (cores, _, _) in found.items())
    assert {name for name, (_, loop, _) in found.items() if loop is OverlappedLoop} == {OVERLAPPED}
    assert {loop for _, loop, _ in found.values()} == {OverlappedLoop, SerialLoop}
    few = {id(found[name][2]) for name in (SHARED, SEPARATE, OVERLAPPED, AUTO_LOOP)}
    assert len(few) == 1, "weights are shared"
    assert id(found[ALL_CORES][2]) not in few


def test_devices_that_are_no_cores_and_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="give the drafter cores"):
        split_cores(EngineConfig(draft_device="cuda:1"))
    if len(CORES) > 1:
        with pytest.raises(ConfigError, match="--threads"):
            split_cores(EngineConfig(threads=1))
    for bad in ("0", "x", "99"):
        with pytest.raises(ConfigError, match="--k"):
            cli._main(["compare", "overlap", "--k", bad])


@two_cores
def test_the_command_ends_in_a_table_and_resumes_where_it_stopped(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    out = tmp_path / "t.json"
    command = ["compare", "overlap", "--prompts", str(prompts), "--model", str(model), "--json", str(out)]
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
    assert {r["sharings"][OVERLAPPED]["overlapped_share"] > 0 for r in document["runs"] if r["size"] == 2} == {
        True
    }
    assert not any(
        r["sharings"][name]["overlapped_share"] for r in document["runs"] for name in (SHARED, SEPARATE, ALL_CORES)
    )
