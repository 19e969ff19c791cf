"""Prices of passes by the experts that they touch: fitted at start, then learnt from what passes touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.control.cost import Curve, MeasuredCost, TargetCost, TimedPass, fit_target
from paceline.control.expert_cost import mean_touched
from paceline.control.files import Profile, from_json, to_json
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import NONE, Decision, Outcomes, StepView, Work

NUM, PER_TOKEN, LAYERS = 64, 8, 4
READ_S, FIXED_S, TOKEN_S = 4e-4, 2e-3, 1e-4
SIZES = (1, 2, 4, 8, 16, 32)


def touched(tokens: float, kept: float) -> float:
    """Distinct experts of tokens of which each keeps a share of its neighbour's."""
    free = PER_TOKEN * (1 + (tokens - 1) * (1 - kept))
    return LAYERS * NUM * (1 - (1 - 1 / NUM) ** free) / (NUM * (1 - (1 - 1 / NUM) ** PER_TOKEN)) * PER_TOKEN


def counts(tokens: int, kept: float) -> tuple[float, ...]:
    """What a pass reports: its own experts, and the means of 1, 2, 4, ... neighbours."""
    windows = [1 << level for level in range(tokens.bit_length())]
    return (touched(tokens, kept), *(touched(w, kept) for w in windows))


def seconds(tokens: int, num_touched: float) -> float:
    return FIXED_S + TOKEN_S * tokens + READ_S * num_touched


def fitted(kept: float = 0.0) -> TargetCost:
    """Fit as a start does: drafts that vary, and of one size drafts that all are one token."""
    passes = [TimedPass(Work(n), seconds(n, touched(n, kept)), touched(n, kept)) for n in SIZES]
    same = touched(1, kept) * 1.2
    passes.append(TimedPass(Work(8), seconds(8, same), same))
    return fit_target(passes, touched=mean_touched(counts(n, kept) for n in SIZES))


def learn(cost: OnlineCost, tokens: int, kept: float, *, prompt: bool) -> None:
    """Let a pass teach: of a prompt beside a row that decodes, or of one row's drafts."""
    prefill = Work(tokens - 1) if prompt else Work(0)
    verified = np.array([0 if prompt else tokens - 1])
    one = np.zeros(1, np.int64)
    target_s = seconds(tokens, touched(tokens, kept))
    outcomes = Outcomes(
        one, one + NONE, verified, one, 0.0, target_s, num_drafted=one, touched=counts(tokens, kept)
    )
    decision = Decision(verified, one + NONE)
    cost.account_step(StepView(one, one, one, prefill), decision, outcomes, prefill)


def test_the_price_of_an_expert_is_fitted() -> None:
    found = fitted()
    assert found.experts is not None
    assert found.experts.read_s == pytest.approx(READ_S, rel=0.02)
    assert float(found(Work(4))) == pytest.approx(seconds(4, touched(4, 0.0)), rel=0.01)


@pytest.mark.parametrize("kept", [0.3, 0.7])
def test_one_prompt_tells_what_any_pass_costs(kept: float) -> None:
    """Calibration saw tokens that share nothing; the text's tokens share experts."""
    cost = OnlineCost(MeasuredCost(fitted(), ()))
    before = cost.pass_s(Work(8))
    assert before > 1.15 * seconds(8, touched(8, kept))
    learn(cost, 64, kept, prompt=True)
    drift = np.exp(cost.machine_drift)
    for n in SIZES:
        assert cost.pass_s(Work(n)) / drift == pytest.approx(seconds(n, touched(n, kept)), rel=0.02)


def test_decoding_corrects_what_prompts_said() -> None:
    cost = OnlineCost(MeasuredCost(fitted(), ()))
    learn(cost, 64, 0.9, prompt=True)
    for _ in range(40):
        learn(cost, 8, 0.2, prompt=False)
        learn(cost, 64, 0.9, prompt=True)
    experts = cost.experts
    assert experts is not None
    for n in (1, 2, 4, 8):
        assert experts.expected_of(n) == pytest.approx(touched(n, 0.2), rel=0.01)
    assert np.all(np.diff(experts.expected) >= 0)


def test_errors_of_a_pass_are_not_blamed_on_its_size() -> None:
    """A pass that touched many experts took long for that reason: nothing else is corrected."""
    cost = OnlineCost(MeasuredCost(fitted(), ()))
    learn(cost, 8, 0.6, prompt=False)
    assert abs(cost.machine_drift) + np.abs(cost.passes.log_error).max() < 0.01


def test_a_profile_keeps_its_experts() -> None:
    profile = Profile(MeasuredCost(fitted(), ()))
    again = from_json(to_json(profile)).cost.target
    assert again.experts.read_s == profile.cost.target.experts.read_s
    np.testing.assert_array_equal(again.experts.touched.seconds, profile.cost.target.experts.touched.seconds)
    plain = replace(profile.cost.target, experts=None)
    assert from_json(to_json(Profile(MeasuredCost(plain, ())))).cost.target.experts is None


def test_means_of_passes_of_several_sizes() -> None:
    curve = mean_touched([(9.0, 4.0, 7.0), (4.0, 4.0), (), (12.0, 6.0, 9.0, 12.0)])
    assert isinstance(curve, Curve)
    assert curve.counts.tolist() == [1, 2, 4]
    assert curve.seconds.tolist() == pytest.approx([14 / 3, 8, 12])
