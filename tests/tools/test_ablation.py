"""The ablation: each neutral element takes out its mechanism and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tools.measure.ablation import AGAIN, FULL, VARIANTS, ablate, main, without

from paceline.control.controller import ClosedLoop
from paceline.control.cost import DraftCost, MeasuredCost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import Outcomes, StepView, Work
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from tests.control.costs import H100
from tests.control.test_course import STEEP, costs
from tests.engine.same_text import PLAIN, make_engine, plain_answers, run
from tests.engine.test_same_text import AUTO

ROWS = np.arange(4)


def loop_without(name: str) -> ClosedLoop:
    cost = OnlineCost(MeasuredCost(STEEP, (DraftCost(()), costs(5e-4, 1e-2))), 1e-3)
    policy = Goodput(cost, 16, (8, 8), (None, np.full(8, 0.7)), honours_stops={1})
    return ClosedLoop(without(name, policy), cost, ("lookup", "head"))


def served(name: str, steps: int = 400) -> ClosedLoop:
    """Serve four rows, the first of which keep drafts more often, by a machine that is slower than measured."""
    loop, rng = loop_without(name), np.random.default_rng(0)
    for row in ROWS.tolist():
        loop.admit(row)
    for step in range(steps):
        prefill = Work(64, 63, 64, 64 * 32) if step % 20 == 0 else Work(0)
        view = StepView(ROWS, np.full(4, 200), np.full(4, 50), prefill, {0: np.full((4, 0), np.nan)})
        loop.plan(view)
        d = loop.decision
        assert d is not None
        kept = np.minimum(rng.geometric(0.2 + 0.15 * ROWS) - 1, d.ks)
        sure = np.where(np.arange(8) < d.ks[:, None], rng.uniform(0.3, 0.9, (4, 8)), np.nan)
        outcomes = Outcomes(ROWS, d.drafters, d.ks, kept, 2e-3, 20e-3, 2e-3, sure, num_drafted=d.ks)
        loop.learn(outcomes, prefill, view, d)
    return loop


def state_of(loop: ClosedLoop) -> dict[str, float]:
    """Return how far each mechanism has moved."""
    policy, cost = loop.policy, loop.cost
    assert isinstance(policy, Goodput)
    assert cost is not None
    head = policy.choice.models[1]
    return {
        "row history": float(np.abs(head.row_logit).max()),
        "confidence": float(head.shared[1]),
        "host time": float(cost.host.row_s.max()),
        "online correction": abs(cost.machine_drift) + float(np.abs(cost.passes.log_error).max()),
        "realised ratio": abs(policy.hysteresis.means.of(4)[1].realised_ratio - 1.0),
        "plain probes": sum(policy.exploration.probes.num_plain.values()),
        "stop rules": float(any(s is not None for s in policy.choice.stoppable)),
    }


def test_each_neutral_element_stops_its_own_mechanism_alone() -> None:
    full = state_of(served(FULL))
    assert all(moved > 1e-3 or (name == "host time" and moved > 0) for name, moved in full.items())
    for name in full:
        state = state_of(served(name))
        assert state[name] == pytest.approx(0.0, abs=2e-5)
        others = {other for other in full if other != name and state[other] > 0}
        assert others == full.keys() - {name}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_plans(name: str) -> None:
    loop = served(name, 60)
    assert loop.decision is not None
    assert loop.decision.seconds > 0


def test_a_variant_keeps_its_change_when_the_controller_begins_anew() -> None:
    """And texts do not depend on it."""
    params = SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True)
    requests = [Request(str(i), (5, 9, 13, 7) * 5, params, seed=i) for i in range(3)]
    expected = plain_answers(requests)
    engine = make_engine(f"{AUTO},k=4", PLAIN)
    ablate(engine, "stop rules")
    for _ in range(2):
        assert isinstance(engine.controller, ClosedLoop)
        assert isinstance(engine.controller.policy, Goodput)
        assert engine.controller.policy.choice.stoppable == [None, None]
        answers = run(engine, requests)
        assert all(answers[i].token_ids == expected[i].token_ids for i in expected)
        engine.forget()
    with pytest.raises(ConfigError, match="--draft auto"):
        ablate(make_engine("ngram:k=2", PLAIN), "trim")


def test_engines_are_compared(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    file = tmp_path / "found.json"
    chosen = ["--without", "plan reuse", "--without", "trim"]
    arguments = ["--model", str(model), "--prompts", str(prompts), "--limit", "2", "--max-tokens", "8", "--sizes"]
    arguments += ["1,2", "--repeat", "2", "--draft", "auto:suffix", "--json", str(file), *chosen]
    assert main(arguments) == 0
    assert "2 in flight" in capsys.readouterr().out
    found = json.loads(file.read_text())["found"]
    assert [f["without"] for f in found[::2]] == [FULL, AGAIN, "trim", "plan reuse"]
    assert all(len(f["ratios"]) == 2 and f["median"] > 0 for f in found)


def test_policies_are_compared_in_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--simulate", str(H100), "--sizes", "2", "--repeat", "2", "--max-tokens", "40"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "row history" in shown
    assert "stop rules" not in shown


@pytest.mark.parametrize(
    "bad",
    [[], ["--prompts", "p", "--sizes", "0"], ["--simulate", "p", "--repeat", "0"], ["--simulate", "nowhere"]],
)
def test_what_cannot_be_run_is_refused(bad: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(bad)
    with pytest.raises(ConfigError, match="--without"):
        main(["--simulate", str(H100), "--without", "stop rules"])
