"""`paceline compare` in small: figures from runs, runs that are not made twice, three of the scenarios."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import dataclass

import pytest

from paceline import cli
from paceline.bench.compare import SETTINGS
from paceline.bench.pictures import draw_batch_sweep
from paceline.bench.scenarios.engine_pool import auto_policy, fixed_policies
from paceline.bench.scenarios.result_file import ResultFile
from paceline.bench.scenarios.rollout import Rollout
from paceline.bench.scenarios.varying_load import LoadPhase, VaryingLoad, parse_phases, windows
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.engine.assembly.cli_options import add_target_arguments


def test_policies_are_spelt_as_draft_has_them():
    assert fixed_policies(("suffix", "eagle3:model=F"), (1, 2)) == (
        *("suffix:k=1", "suffix:k=2"),
        *("eagle3:model=F,k=1", "eagle3:model=F,k=2"),
    )
    assert auto_policy(("suffix", "eagle3")) == "auto:suffix+eagle3"


def test_phases_are_read():
    assert parse_phases("chat:1,code:64") == (LoadPhase("chat", 1), LoadPhase("code", 64))
    for bad in ("chat", "chat:0", ":3", "chat:x"):
        with pytest.raises(ConfigError, match="--phases"):
            parse_phases(bad)


@dataclass
class Measured:
    """What a picture is drawn from."""

    sizes: tuple[int, ...] = (8, 1, 2)
    auto: str = "auto:suffix"

    def rates(self, size: int) -> dict[str, list[float]]:
        return {"off": [10.0 * size], self.auto: [12.0 * size]}

    def gains(self, size: int) -> dict[str, float]:
        return {"suffix:k=1": 1.1}


def test_a_picture_goes_from_few_requests_to_many(tmp_path, monkeypatch):
    """In whatever order they were measured."""
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_batch_sweep(Measured(), tmp_path / "c.png")
    for line in drawn[0].axes[0].lines:
        assert line.get_xdata().tolist() == [1, 2, 8]
        assert line.get_ydata().tolist() == sorted(line.get_ydata())


def round_of(ours: int, plain: int, machine_s: float = 0.01) -> dict[str, object]:
    return {"machine_s": machine_s, "full": ["off", "auto"], "auto": (1.0, ours, 0), "off": (1.0, plain, 0)}


def test_windows_compare_rounds_side_by_side_and_leave_stalls_out():
    busy = [round_of(12, 10)] * 10 + [round_of(8, 10)] * 4 + [round_of(8, 10, 0.1)]
    alone = [{"machine_s": 0.01, "full": ["off"], "off": (1.0, 10, 0)}] * 5  # the other one has finished
    ending = [round_of(2, 10) | {"full": ["off"]}] * 5  # or has few left
    steady, stalled = windows([busy, ending, alone], "auto", "off")
    assert steady == pytest.approx([1.2, 1.2])
    assert stalled == pytest.approx([0.8])


def test_a_window_counts_what_is_read_of_prompts():
    """Plain decoding takes 0.1 s for a token and 0.01 s for one of a prompt; it reads late, the other early."""
    writes, reads = (1.0, 10, 0), (1.0, 5, 50)
    first = [{"machine_s": 0.01, "full": ["off", "auto"], "auto": reads, "off": writes}] * 5
    then = [{"machine_s": 0.01, "full": ["off", "auto"], "auto": writes, "off": reads}] * 5
    faster = [{"machine_s": 0.01, "full": ["off", "auto"], "auto": (0.5, 5, 50), "off": writes}] * 5
    assert windows([first + then + faster], "auto", "off")[0] == pytest.approx([1.0, 1.0, 2.0])


def test_a_day_is_set_against_the_one_policy_that_was_best_all_day(tmp_path):
    results = ResultFile(tmp_path / "d.json", {}, {})
    rates = {"off": (10, 10), "ngram:k=1": (12, 12), "ngram:k=3": (20, 5), "auto:ngram": (18, 11)}
    for index in range(2):
        rounds = [{"machine_s": 0.01, "full": [], **{name: (1.0, rate[index], 0) for name, rate in rates.items()}}]
        results.once({"phase": index}, lambda: {"task": "chat", "in_flight": 1, "rounds": rounds})  # noqa: B023
    verdict = VaryingLoad(None, results, [], SamplingParams(), tuple(rates), ()).verdict()
    assert verdict["ngram:k=1"]["to_best"] == 1.0
    assert verdict["auto:ngram"]["to_best"] == pytest.approx((1.8 * 1.1) ** 0.5 / 1.2)
    assert verdict["ngram:k=3"]["worst_phase"] == 0.5


def test_a_run_is_made_once(tmp_path):
    file = tmp_path / "c.json"
    first = ResultFile(file, {"sizes": (1, 2)}, {"git": "a"})
    assert first.once({"size": 1}, lambda: {"rate": 3.0})["rate"] == 3.0
    again = ResultFile(file, {"sizes": (1, 2)}, {"git": "a"})
    assert again.once({"size": 1}, lambda: {"rate": 4.0})["rate"] == 3.0
    assert again.once({"size": 2}, lambda: {"rate": 5.0})["rate"] == 5.0
    assert len(json.loads(file.read_text())["runs"]) == 2
    with pytest.raises(ConfigError, match="other settings"):
        ResultFile(file, {"sizes": (1,)}, {})
    file.write_text("{")
    with pytest.raises(ConfigError, match="no comparison"):
        ResultFile(file, {"sizes": (1,)}, {})


def test_runs_of_other_builds_machines_and_settings_are_not_mixed(tmp_path):
    file = tmp_path / "c.json"
    head = {
        "command": "x",
        "git": "a",
        "version": "1",
        "machine": {"cpu": "A", "cores": 2},
        "model": {"name": "m"},
    }
    ResultFile(file, {"max_len": 8}, head).write()
    assert ResultFile(file, {"max_len": 8}, {**head, "command": "y"}).runs == []
    for change, message in (
        ({"git": "b"}, r"git \(was a, is b\)"),
        ({"version": "2"}, "version"),
        ({"machine": {"cpu": "B", "cores": 2}}, r"machine or model: cpu \(was A, is B\); name another file"),
        ({"model": {"name": "n"}}, "name"),
    ):
        with pytest.raises(ConfigError, match=message):
            ResultFile(file, {"max_len": 8}, head | change)
    with pytest.raises(ConfigError, match=r"max_len \(was 8, is 9\)"):
        ResultFile(file, {"max_len": 9}, head)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="no comparison"):
        ResultFile(file, {}, head)


def test_flags_of_the_engine_are_settings_of_a_comparison():
    """A run under another of them is another comparison."""
    parser = ArgumentParser(add_help=False)
    add_target_arguments(parser)
    told_by_the_head = {"device", "numerics"}
    without_effect = {"packed_cache_bytes", "kv_disk_bytes", "max_rows", "max_queued_tokens"}
    assert {a.dest for a in parser._actions} - set(SETTINGS) == told_by_the_head | without_effect


def test_the_time_of_a_rollout_is_set_against_the_best_that_was_chosen_by_hand(tmp_path):
    results = ResultFile(tmp_path / "r.json", {}, {})
    seconds = {"off": (10.0, 30.0), "ngram:k=1": (8.0, 24.0), "ngram:k=3": (9.0, 20.0), "auto:ngram": (7.0, 21.0)}
    for repeat in range(2):
        results.once({"repeat": repeat}, lambda: {"seconds": {name: s[repeat] for name, s in seconds.items()}})  # noqa: B023
    rows = {x["policy"]: x for x in Rollout(None, results, [], SamplingParams(), tuple(seconds)).rows()}
    assert rows["auto:ngram"]["to_off"]["median"] == 0.7
    assert rows["ngram:k=3"]["to_best"]["median"] == 1.0, "fewest seconds in the median, not in the first repeat"
    assert rows["auto:ngram"]["to_best"]["median"] == pytest.approx((7 / 9 + 21 / 20) / 2)
    assert rows["off"]["seconds"] == 20.0


SCENARIOS = {
    "batches": ["--sizes", "1,2", "--repeat", "2", "--screen", "1"],
    "day": ["--phases", "writing:1,qa:2", "--static", "ngram:k=2"],
    "rollout": ["--requests", "3", "--repeat", "2"],
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_ends_in_a_table_and_resumes_where_it_stopped(
    name, model, prompts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    out, picture = tmp_path / "c.json", tmp_path / "c.png"
    common = [
        "--prompts",
        str(prompts),
        "--model",
        str(model),
        "--threads",
        "1",
        "--json",
        str(out),
        "--draft",
        "ngram",
    ]
    command = [
        "compare",
        name,
        *common,
        "--max-tokens",
        "6",
        "--limit",
        "2",
        "--plot",
        str(picture),
        *SCENARIOS[name],
    ]
    tables = []
    for _ in range(2):
        assert cli.main(command) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1], "nothing was measured again"
    assert "auto:ngram" in tables[0]
    assert json.loads(out.read_text())["summary"]
    assert picture.exists() == (name == "batches")


def test_categories_are_chosen_by_name(model, prompts, capsys):
    from argparse import Namespace

    from paceline.bench.compare import _prompts

    asked = Namespace(prompts=[str(prompts)], category=["qa"])
    assert {p.category for p in _prompts(asked)} == {"qa"}
    command = ["compare", "rollout", "--prompts", str(prompts), "--model", str(model)]
    assert cli.main([*command, "--category", "q"]) == 2
    assert "there is qa" in capsys.readouterr().err
