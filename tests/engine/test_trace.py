"""What the controller wrote down is what it did, and can be done again."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from paceline import cli
from paceline.bench.explain import bucket_line
from paceline.control.controller import ClosedLoop
from paceline.control.cost import MeasuredCost
from paceline.control.files import make_loop, read_profile
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import Outcomes, StepView, Work
from paceline.control.trace_files import Tracer, replay
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams, Speculation
from paceline.core.request_nouns import Request
from paceline.engine.assembly import auto
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.engine import Engine
from tests.engine.same_text import PLAIN, STAIRCASE, make_engine, run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    engine = make_engine("auto:suffix+draft-model:model=noisy,k=4", PLAIN)
    config = EngineConfig(draft="auto", profile=STAIRCASE, trace=str(file))
    auto.close_loop(engine, config, "tiny")
    params = SamplingParams(temperature=0.7, max_tokens=60, ignore_eos=True)
    wishes = (None, None, Speculation("suffix"), Speculation("off"))
    run(engine, [Request(str(i), (5, 9, 13, 7) * 5, params, seed=i, speculation=w) for i, w in enumerate(wishes)])
    return file


def test_a_replay_makes_the_same_choices(trace: Path) -> None:
    steps = list(replay(trace))
    assert len(steps) > 20
    for step in steps:
        assert (step.now.ks == step.then.ks).all()
        assert (step.now.drafters == step.then.drafters).all()
    assert sum(step.outcomes.num_verified.sum() for step in steps) > 0


def test_an_engine_that_comes_after_leaves_the_trace_of_the_one_before(trace: Path) -> None:
    engine = make_engine("auto:suffix+draft-model:model=noisy,k=4", PLAIN)
    before = trace.read_text()
    link = trace.with_name("link")
    link.symlink_to("/dev/null")
    for file in (trace, link, Path("/dev/null")):
        auto.close_loop(engine, EngineConfig(draft="auto", profile=STAIRCASE, trace=str(file)), "tiny")
    assert Path(f"{trace}.before").read_text() == before
    assert sorted(file.name for file in trace.parent.iterdir()) == ["link", "trace.jsonl", "trace.jsonl.before"]


def test_what_was_learnt_is_forgotten_between_runs_and_in_their_replay(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    engine = make_engine("auto:suffix+draft-model:model=noisy,k=4", PLAIN)
    config = EngineConfig(draft="auto", profile=STAIRCASE, trace=str(file))
    auto.close_loop(engine, config, "tiny")
    params = SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True)
    requests = [Request(str(i), (5, 9, 13, 7) * 5, params, seed=i) for i in range(3)]
    cold = habits(engine)
    run(engine, requests)
    learnt = habits(engine)
    assert learnt != cold
    engine.forget()
    assert habits(engine) == cold
    run(engine, requests)
    assert habits(engine) != cold
    steps = list(replay(file))
    assert len(steps) > 20
    for step in steps:
        assert (step.now.ks == step.then.ks).all()
        assert (step.now.drafters == step.then.drafters).all()


def habits(engine: Engine) -> list[list[float]]:
    """What the controller expects of new requests, by drafter and depth."""
    assert isinstance(engine.controller, ClosedLoop)
    policy = engine.controller.policy
    assert isinstance(policy, Goodput)
    return [s.alive(np.array([3]), 4).ravel().tolist() for s in policy.choice.models]


class ReusesAtFirst(Goodput):
    """Its first three steps need no plan."""

    def reuse_without_view(self, num_rows: int) -> bool:
        self._step += 1
        return self._step <= 3


def test_a_step_without_a_plan_is_written_though_nobody_had_a_row_in_it() -> None:
    file, profile = StringIO(), read_profile(Path(STAIRCASE))
    tracer = Tracer(file, profile, ["suffix", "draft-model"], 4, [4, 4])
    policy = ReusesAtFirst(OnlineCost(profile.cost), 4, [4, 4])
    loop = ClosedLoop(policy, OnlineCost(profile.cost), ["suffix", "draft-model"], tracer)
    assert loop.reuse_plan(1)
    assert loop.reuse_plan(1)
    none = np.zeros(1, np.int64)
    loop.plan(StepView(none, none + 9, none, Work(0)))
    lines = [json.loads(line) for line in file.getvalue().splitlines()[1:]]
    assert [line.get("rested") for line in lines] == [0, 0, None]


def test_a_full_disk_ends_the_trace_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Full(StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space left")

    tracer = Tracer(Full(), read_profile(Path(STAIRCASE)), [], 4, [])
    tracer.admitted(0, {})
    assert [record.message for record in caplog.records] == [
        "the trace ends here, as it cannot be written: no space left"
    ]


def test_a_replay_tells_what_was_trimmed(trace: Path) -> None:
    """As if the last draft of a step with a confidence had not been verified."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    whole = sum(int(step.dropped.sum()) for step in replay(trace))
    outcomes = next(
        o for line in lines if (o := line.get("outcomes")) and o["confidence"] and max(o["num_verified"])
    )
    row = next(i for i, n in enumerate(outcomes["num_verified"]) if n)
    outcomes["num_verified"][row] -= 1
    outcomes["num_accepted"][row] = min(outcomes["num_accepted"][row], outcomes["num_verified"][row])
    trace.write_text("\n".join(map(json.dumps, lines)))
    steps = list(replay(trace))
    assert sum(int(step.dropped.sum()) for step in steps) == whole + 1
    assert 0 < sum(step.dropped_tokens for step in steps) <= whole + 1


def test_explain_tells_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(trace)]) == 0
    shown = capsys.readouterr().out
    steps = len(list(replay(trace)))
    assert f"the replay chose the same in {steps} of {steps} steps" in shown
    assert "speed-up" in shown
    assert "trimmed: " in shown
    assert "passes were padded to a bucket; tokens fill " in shown
    assert cli.main(["explain", str(trace), "--step", "5"]) == 0
    shown = capsys.readouterr().out
    assert "suffix: " in shown
    assert "costs what its bucket of " in shown


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (3, "the pass has 3 tokens and costs what its bucket of 4 does, 1.10 ms; the bucket of 8 costs 0.50 ms"),
        (64, "the pass has 64 tokens and costs what its bucket of 64 does, 8.00 ms"),
        (65, "the pass has 65 tokens, more than the largest bucket, 64"),
    ],
)
def test_explain_tells_the_bucket_of_a_pass(tokens: int, said: str) -> None:
    cost = read_profile(Path(STAIRCASE)).cost
    assert isinstance(cost, MeasuredCost)
    assert bucket_line(cost.target.by_tokens, tokens).removesuffix(" more") == said


def test_explain_tells_what_was_known_of_the_group_whose_step_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Group 0 has a row whose drafts are kept, group 1 two whose drafts are not, and its plan comes in between."""
    file = tmp_path / "turns.jsonl"
    with file.open("w") as lines:
        profile = read_profile(Path(STAIRCASE))
        tracer = Tracer(lines, profile, ["suffix"], 3, [4])
        loop = make_loop(profile, ["suffix"], 3, [4], tracer)
        for row in range(3):
            loop.admit(row)
        views = [_view(0), _view(1, 2)]
        loop.plan(views[0])
        for _ in range(20):
            for group, kept in ((0, 4), (1, 0)):
                (loop, loop.second_group)[1 - group].plan(views[1 - group])
                ended, rows = (loop, loop.second_group)[group], views[group].rows
                four = np.full(len(rows), 4)
                outcomes = Outcomes(rows, four * 0, four, four * 0 + kept, 0.001, 0.01, num_drafted=four)
                ended.learn(outcomes, Work(0), ended.view, ended.decision)
                tracer.learnt(outcomes, Work(0), group)
    tables = []
    for step in ("39", "40"):
        assert cli.main(["explain", str(file), "--step", step]) == 0
        tables.append([line for line in capsys.readouterr().out.splitlines() if "suffix: " in line])
    assert [len(table) for table in tables] == [1, 2]
    first = [[float(line.split("suffix: ")[1].split()[0]) for line in table] for table in tables]
    assert min(first[0]) > 0.6 > max(first[1])


def _view(*rows: int) -> StepView:
    index = np.array(rows, np.int64)
    return StepView(index, index * 0 + 50, index * 0 + 8, Work(0))


def test_a_trace_that_ends_in_the_middle_of_a_line_is_read_up_to_there(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = len(list(replay(trace)))
    whole = trace.read_text()
    trace.write_text(whole + whole.splitlines()[-1][:30])
    assert len(list(replay(trace))) == steps
    trace.write_text(whole.removesuffix("\n"))  # this one is whole but for its end
    assert len(list(replay(trace))) == steps
    trace.write_text(whole[:-30])
    assert len(list(replay(trace))) == steps - 1
    assert cli.main(["explain", str(trace)]) == 0
    assert f"{steps - 1} steps" in capsys.readouterr().out


def test_what_is_no_trace_is_refused(trace: Path, tmp_path: Path) -> None:
    lines = trace.read_text().splitlines()
    begun = lines[0] + "\n"
    view = next(line for line in map(json.loads, lines) if line.get("view", {}).get("rows"))
    far = {**view, "view": {**view["view"], "rows": [99 for _ in view["view"]["rows"]]}}
    bad = {
        "list": "[]\n",
        "later list": begun + "[1]\n",
        "row": begun + '{"admitted": 99}\n',
        "rows": begun + json.dumps(far) + "\n",
        "large": begun + '{"rested": 1, "host_s": 1' + "0" * 400 + "}\n",
        "offers": begun + json.dumps({**view, "view": {**view["view"], "offers": []}}) + "\n",
        "deep": begun + "[" * 200_000 + "\n",
        "empty": "",
        "text": "x",
        "other": '{"format": "y"}',
        "cut": "\n".join(lines[:3]) + '\n{"view": {"rows"\n',
    }
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="trace"):
            list(replay(tmp_path / name))
    with pytest.raises(ConfigError, match="--trace"):
        auto.close_loop(
            make_engine("auto:suffix+draft-model:model=noisy,k=4", PLAIN),
            EngineConfig(draft="auto", profile=STAIRCASE, trace="/nonexistent/folder/t"),
            "tiny",
        )


@pytest.mark.parametrize("law", ["coupled", "typical"])
def test_explain_says_that_texts_were_changed(
    law: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    engine = make_engine("auto:suffix+draft-model:model=noisy,k=4", PLAIN, law)
    auto.close_loop(engine, EngineConfig(draft="auto", law=law, profile=STAIRCASE, trace=str(file)), "tiny")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    run(engine, [Request("a", (5, 9, 13, 7) * 5, params, seed=1)])
    assert cli.main(["explain", str(file)]) == 0
    assert ("changed tokens" in capsys.readouterr().out) == (law == "typical")
