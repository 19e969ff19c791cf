"""`paceline simulate`: which costs it takes, how deep it drafts, what it refuses before it begins."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from paceline import cli
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.files import Profile, write_profile

if TYPE_CHECKING:
    from pathlib import Path

FLAT = TargetCost(Curve.of([1, 1000], [0.01, 0.01]))  # verifying more costs nothing more
SLOW = DraftCost(tuple(Curve.of([1, 64], [0.002 * k, 0.004 * k]) for k in range(1, 6)))
SLOWER = DraftCost(tuple(Curve.of([1, 64], [0.005 * k, 0.01 * k]) for k in range(1, 6)))
FREE = DraftCost(())
USUAL = ["--rows", "4", "--output-tokens", "32", "--requests", "16", "--acceptance", "0.9,0.8,0.7,0.6,0.5"]


@pytest.fixture
def profile(tmp_path: Path) -> Any:
    """A function that writes a profile of some drafters and returns the command that simulates it."""

    def written(**drafters: DraftCost) -> list[str]:
        cost = MeasuredCost(FLAT, tuple(drafters.values()))
        write_profile(tmp_path / "profile.json", Profile(cost, tuple(drafters)))
        return ["simulate", "--profile", str(tmp_path / "profile.json"), *USUAL]

    return written


def simulated(command: list[str], tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return what was found of each policy."""
    file = tmp_path / "found.json"
    assert cli.main([*command, "--json", str(file)]) == 0
    return {f["policy"]: f for f in json.loads(file.read_text())["found"]}


def test_policies_draft_as_deep_as_acceptance_is_given(profile: Any, tmp_path: Path) -> None:
    found = simulated(profile(lookup=FREE), tmp_path)
    for name in ("turbospec", "ours"):
        assert found[name]["tokens_per_pass"] > 2.5, "drafts are free and kept; one of them brings 2 at most"


def test_drafting_takes_the_time_of_the_drafter_that_takes_any(
    profile: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*profile(lookup=FREE, slow=SLOW), "--policy", "static:5", "--overlap", "on"]
    own, same = (
        simulated([*command, "--draft-device", d], tmp_path)["static:5"]["tpot_s"] for d in ("own", "same")
    )
    assert own < 0.9 * same
    assert "drafts of slow" in capsys.readouterr().out
    simulated(profile(lookup=FREE), tmp_path)
    assert "drafts of lookup that cost nothing" in capsys.readouterr().out
    simulated(profile(), tmp_path)
    assert "drafts that cost nothing" in capsys.readouterr().out


def test_a_step_takes_what_the_host_does_too(profile: Any, tmp_path: Path) -> None:
    """As a real one does, where the profile knows of it."""
    command, file = [*profile(slow=SLOW), "--policy", "off"], tmp_path / "profile.json"
    without = simulated(command, tmp_path)["off"]["tpot_s"]
    written = json.loads(file.read_text())
    written["about"]["host_s"] = 0.5 * without
    file.write_text(json.dumps(written))
    assert simulated(command, tmp_path)["off"]["tpot_s"] > 1.4 * without


def test_of_several_drafters_one_must_be_named(
    profile: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*profile(lookup=FREE, slow=SLOW, slower=SLOWER), "--policy", "static:3"]
    assert cli.main(command) == 2
    assert "choose one with --drafter: lookup, slow, slower" in capsys.readouterr().err
    assert cli.main([*command, "--drafter", "slw"]) == 2
    assert "lookup, slow, slower" in capsys.readouterr().err
    rates = [
        simulated([*command, "--drafter", name], tmp_path)["static:3"]["tokens_per_s"]
        for name in ("lookup", "slow", "slower")
    ]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 3


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_drafts_deeper_than_acceptance_is_known_are_not_kept(profile: Any, tmp_path: Path, overlap: str) -> None:
    command = [*profile(slow=SLOW), "--acceptance", "1,0.9", "--overlap", overlap]
    command += ["--policy", "static:2", "--policy", "static:3", "--policy", "static:16", "--policy", "average"]
    found = simulated(command, tmp_path)
    assert 2.6 < found["static:2"]["tokens_per_pass"] <= 3
    assert {found[name]["tokens_per_pass"] for name in ("static:3", "static:16")} == {
        found["static:2"]["tokens_per_pass"]
    }
    assert found["static:16"]["tpot_s"] > found["static:2"]["tpot_s"]


def test_next_to_nothing_is_kept_behind_a_share_of_0(profile: Any, tmp_path: Path) -> None:
    found = simulated([*profile(slow=SLOW), "--acceptance", "0.9,0,0"], tmp_path)
    assert 1.8 < found["static:3"]["tokens_per_pass"] < 2
    assert found["ours"]["tokens_per_pass"] < 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--acceptance", "2"], "between 0 and 1"),
        (["--acceptance=-0.1"], "between 0 and 1"),
        (["--acceptance", "nan"], "between 0 and 1"),
        (["--acceptance", "0.5,0.6"], "never rise"),
        (["--acceptance", "x"], "such as 0.7"),
        (["--acceptance", ",".join(["0.5"] * 17)], "at most 16"),
        (["--policy", "static:17"], "known are"),
        (["--policy", "off", "--policy", "statc:3"], "known are"),
        (["--requests", "0"], "--requests must be between"),
        (["--seed", "-1"], "--seed must be between"),
        (["--seed", str(1 << 64)], "--seed must be between"),
        (["--json", "/nonexistent/x.json"], "cannot write into the folder"),
        (["--json", "."], "is a folder"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_it_begins(
    profile: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main([*profile(slow=SLOW), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "simulating" not in error


def test_answers_of_one_token_do_not_count_in_the_time_per_token(
    profile: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a bench: there is no token after the first."""
    trace = tmp_path / "requests.jsonl"
    command = [*profile(slow=SLOW), "--policy", "off", "--trace", str(trace)]
    for lengths, expected in (((1, 1, 1, 9), 0.01), ((1, 1), None)):
        rows = [{"arrival_s": 0.0, "prompt_tokens": 1, "output_tokens": n} for n in lengths]
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = simulated(command, tmp_path)["off"]
        assert [found[name] for name in ("tpot_s", "tpot_p99_s")] == [expected and pytest.approx(expected)] * 2
    assert " - " in capsys.readouterr().out


def test_the_largest_seed_is_one(profile: Any, tmp_path: Path) -> None:
    assert simulated([*profile(slow=SLOW), "--policy", "static:1", "--seed", str((1 << 63) - 1)], tmp_path)


# Fleets ------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(profile: Any, tmp_path: Path) -> list[str]:
    """A command that simulates a fleet on a trace of conversations with a common beginning."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 200 * n,
            "input_length": 2048,
            "output_length": 20,
            "hash_ids": [0, n % 7 + 1, n % 7 + 8, 100 + n],
        }
        for n in range(60)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = profile(slow=SLOW)
    del command[command.index("--rows") : command.index("--acceptance")]
    return [*command, "--rows", "8", "--replicas", "4", "--trace", str(trace), "--trace-format", "mooncake"]


def routed(command: list[str], tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return what was found of each route."""
    file = tmp_path / "found.json"
    assert cli.main([*command, "--json", str(file)]) == 0
    return {f["route"]: f for f in json.loads(file.read_text())["found"]}


@pytest.mark.parametrize("clock", ["fluid", "steps"])
def test_a_fleet_is_compared_by_routes(
    fleet: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: str
) -> None:
    found = routed([*fleet, "--route", "seconds,prefix,least,round-robin", "--clock", clock], tmp_path)
    assert found["seconds"]["hits"] > 1.2 * found["round-robin"]["hits"]
    assert found["round-robin"]["busiest"] == 1
    said = capsys.readouterr()
    assert all(name in said.out for name in ("hits", "TTFT", "busiest/mean", "lost", "wasted tokens", "least"))
    assert "simulating: 0 %" in said.err


def test_deaths_cost_answers_only_without_resume(fleet: list[str], tmp_path: Path) -> None:
    command = [*fleet, "--route", "seconds", "--deaths", "5000/h", "--back", "1"]
    with_resume, without = (routed([*command, "--resume", on], tmp_path)["seconds"] for on in ("on", "off"))
    assert with_resume["lost"] == 0 < with_resume["moved"]
    assert without["lost"] > 0


@pytest.mark.parametrize("clock", ["fluid", "steps"])
@pytest.mark.parametrize("policy", ["static:3", "average", "table"])
def test_drafts_deeper_than_acceptance_is_known_are_not_kept_in_a_fleet(
    fleet: list[str], tmp_path: Path, policy: str, clock: str
) -> None:
    command = [*fleet, "--acceptance", "1,0.9", "--route", "least", "--clock", clock]
    deep, known = (
        routed([*command, "--policy", name], tmp_path)["least"]["tpot_mean_s"] for name in (policy, "static:2")
    )
    assert known < deep < 2 * known, "drafts that are not kept take time, and nothing else happens"


@pytest.mark.parametrize("arrivals", ["closed", "poisson:100"])
def test_replicas_die_until_the_last_answer_and_alike_for_each_route(
    profile: Any, tmp_path: Path, arrivals: str
) -> None:
    """With the default all requests are there from the start, and none comes later."""
    command = [*profile(slow=SLOW), "--replicas", "2", "--route", "least,round-robin", "--arrivals", arrivals]
    found = routed([*command, "--deaths", "36000/h", "--back", "0.1"], tmp_path)
    assert all(f["lost"] == 0 < f["moved"] for f in found.values())
    lossy = routed([*command, "--deaths", "rack:36000/h,2", "--back", "0.1", "--resume", "off"], tmp_path)
    assert all(0 < f["lost"] and 0 < f["replica_hours"] < 1 / 3600 for f in lossy.values())


def test_scale_and_seed_are_of_a_fleet_too(fleet: list[str], tmp_path: Path) -> None:
    command = [*fleet, "--policy", "static:5", "--route", "least"]
    for clock in ("fluid", "steps"):
        often, seldom = (
            routed([*command, "--clock", clock, "--scale", x], tmp_path)["least"]["tpot_mean_s"]
            for x in ("1", "0.3")
        )
        assert often < 0.8 * seldom
    first, other = (
        routed([*command, "--clock", "steps", "--seed", x], tmp_path)["least"]["tpot_mean_s"] for x in ("0", "1")
    )
    assert first != other


def test_copies_speeds_and_a_scaler(fleet: list[str], tmp_path: Path) -> None:
    fixed = routed([*fleet, "--route", "least", "--copies", "2", "--speeds", "1,0.5"], tmp_path)["least"]
    scaled = routed([*fleet, "--route", "least", "--objective", "1000,100"], tmp_path)["least"]
    assert scaled["replica_hours"] < 0.5 * fixed["replica_hours"]
    assert scaled["busiest"] == 1, "one replica was enough, and the others are no part of the mean"


def test_a_trace_of_a_service_serves_one_engine_too(fleet: list[str], tmp_path: Path) -> None:
    """As far as --requests says, as with a fleet."""
    command = [*fleet, "--replicas", "1", "--rows", "4", "--policy", "off"]
    all_of_it, some = (simulated([*command, "--requests", n], tmp_path)["off"]["steps"] for n in ("99", "16"))
    assert 100 < some < 0.5 * all_of_it


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--route", "fastest"], "known are seconds"),
        (["--route", "least", "--policy", "off", "--policy", "ours"], "one --policy"),
        (["--route", "least", "--rows", "1,2"], "one number of --rows"),
        (["--route", "least", "--overlap", "on"], "no --overlap"),
        (["--route", "least", "--spread", "0.5"], "no --spread"),
        (["--route", "least", "--deaths", "often"], "--deaths often: write"),
        (["--route", "least", "--speeds", "1,x"], "--speeds 1,x: write"),
        (["--route", "least", "--speeds", "0"], "--speeds 0: write"),
        (["--route", "least", "--objective", "nan"], "--objective nan: write"),
        (["--route", "least", "--copies", "0"], "--copies must be between"),
        (["--route", "least", "--back", "-1"], "--back must be between"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_before_it_begins(
    fleet: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main([*fleet, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "simulating" not in error


def test_a_profile_of_whole_steps_must_be_told_what_prompts_cost(
    fleet: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.json"
    stats = {"1": {"0": 6.0, "1": 8.0}, "64": {"0": 8.0, "1": 12.0}}
    values = {"batch_stats": stats, "max_num_speculative_tokens": 1, "acceptance_rate_per_pos": [0.7]}
    table.write_text(json.dumps(values))
    fleet[fleet.index("--profile") + 1] = str(table)
    del fleet[fleet.index("--rows") : fleet.index("--rows") + 2]  # 64 by default
    command = [*fleet, "--acceptance", "0.7", "--route", "seconds"]
    assert cli.main(command) == 2
    assert "give --prefill-rate" in capsys.readouterr().err
    assert routed([*command, "--prefill-rate", "20000"], tmp_path)["seconds"]["ttft_mean_s"] < 1
