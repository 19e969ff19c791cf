"""What a controller has learnt comes back as it was, counts for little, and is refused when it is not ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.acceptance import MAX_LOGIT
from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.files import Profile, make_loop
from paceline.control.goodput import Goodput
from paceline.control.learnt import (
    MAX_AGE_DAYS,
    MAX_LEARNT_BYTES,
    MIN_PASSES,
    SECONDS_A_DAY,
    KeptLearning,
    Learnt,
    from_bytes,
    learnt_by,
    to_bytes,
)
from paceline.control.policy import Outcomes, StepView, Work
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAMES, ROWS, DEPTH = ("suffix", "head"), 32, 8
TARGET = TargetCost(Curve.of([1, 8, 32, 128], [0.010, 0.011, 0.014, 0.040]), 0.0, 1e-7, 1e-8)
HEAD = DraftCost(tuple(Curve.of([1, 32], [4e-4 * k, 4e-3 * k]) for k in range(1, DEPTH + 1)))
PROFILE = Profile(MeasuredCost(TARGET, (DraftCost(()), HEAD)), NAMES, about={"host_s": 1e-4})
WRONG: list[object] = [float("nan"), float("inf"), -1e30, 1e30, "1", None, [1.0], {}]
KEY, NOW = "k" * 64, 1.8e9


def fresh(before: KeptLearning | None = None) -> ClosedLoop:
    return make_loop(PROFILE, NAMES, ROWS, [DEPTH, DEPTH], learnt=before)


def view_of(num_rows: int, length: int) -> StepView:
    """Return a step of rows for which lookup finds nothing."""
    nothing = {0: np.full((num_rows, 0), np.nan)}
    return StepView(np.arange(num_rows), np.full(num_rows, length), np.full(num_rows, 50), Work(0), nothing)


@dataclass
class Traffic:
    """Rows whose drafts are kept with a chance, on a machine that takes some factor longer."""

    chance: float
    slower: float = 1.0
    seed: int = 0

    def serve(self, loop: ClosedLoop, num_rows: int, steps: int) -> None:
        rng, rows = np.random.default_rng(self.seed), np.arange(num_rows)
        for row in rows.tolist():
            loop.admit(row)
        for step in range(steps):
            view = view_of(num_rows, 100 + step)
            loop.plan(view)
            d = loop.decision
            assert d is not None
            kept = np.minimum(rng.geometric(1 - self.chance, num_rows) - 1, d.ks)
            sure = np.where(np.arange(DEPTH) < d.ks[:, None], rng.uniform(0.2, 0.95, (num_rows, DEPTH)), np.nan)
            pass_s = float(TARGET(view.work + Work(int(d.ks.sum())))) * self.slower
            draft_s = 1.3e-3 * int(d.ks.any())
            outcomes = Outcomes(rows, d.drafters, d.ks, kept, draft_s, pass_s, 3e-4, sure, num_drafted=d.ks)
            loop.learn(outcomes, Work(0), view, d)


def learnt_from(loop: ClosedLoop, before: Learnt | None = None) -> Learnt:
    found = learnt_by(loop, KEY, "tiny", NOW, before)
    assert found is not None
    return found


def taught(chance: float, num_rows: int = 2, slower: float = 1.0, seed: int = 0, steps: int = 200) -> ClosedLoop:
    loop = fresh()
    Traffic(chance, slower, seed).serve(loop, num_rows, steps)
    return loop


def goodput(loop: ClosedLoop) -> Goodput:
    assert isinstance(loop.policy, Goodput)
    return loop.policy


def chances(loop: ClosedLoop) -> NDArray[np.float64]:
    """Chance of each depth of the head for a new row, given the one before."""
    loop.admit(0)
    alive = goodput(loop).choice.models[1].alive(np.array([0]), DEPTH)[0]
    found: NDArray[np.float64] = alive / np.concatenate(([1.0], alive[:-1]))
    return found


@settings(max_examples=15)
@given(st.floats(0.05, 0.95), st.sampled_from([1, 2, 12, 32]), st.floats(0.8, 1.5), st.integers(0, 9))
def test_what_was_kept_comes_back_as_it_was(chance: float, rows: int, slower: float, seed: int) -> None:
    loop = taught(chance, rows, slower, seed)
    kept = learnt_from(loop)
    read = from_bytes(to_bytes(kept))
    assert read == kept
    again = fresh(KeptLearning(read, 0.0))
    assert chances(again) == pytest.approx(chances(loop), abs=1e-6)
    assert loop.cost is not None
    assert again.cost is not None
    loop.cost.machine_drift = 0.0  # comes and goes
    for work in (Work(1, 0, 100, 100), Work(8, 0, 2000, 2000), Work(64, 0, 9000, 9000)):
        assert again.cost.pass_s(work) == pytest.approx(loop.cost.pass_s(work), rel=1e-6)
    assert again.cost.draft_factor == pytest.approx(loop.cost.draft_factor)
    ours, theirs = goodput(loop).hysteresis.means, goodput(again).hysteresis.means
    assert ours.by_load.keys() == theirs.by_load.keys()
    for load, kinds in ours.by_load.items():
        for one, other in zip(kinds, theirs.by_load[load], strict=True):
            assert one.known == other.known
            assert other.realised_ratio == pytest.approx(one.realised_ratio)


def test_an_engine_that_begins_with_it_chooses_at_once_as_the_other_did_at_its_end() -> None:
    view = view_of(2, 120)
    for chance in (0.1, 0.9):
        loop = taught(chance, steps=400)
        again = fresh(KeptLearning(learnt_from(loop), 1.0))
        for one, row in ((loop, 0), (loop, 1), (again, 0), (again, 1)):
            one.admit(row)
        policies = goodput(loop), goodput(again)
        then, now = (p.choice.choose(view, p._context).allocation.ks for p in policies)
        assert (now > 0).tolist() == (then > 0).tolist()
        assert np.abs(now - then).max() <= 2


@pytest.mark.parametrize(("old", "new"), [(0.9, 0.2), (0.2, 0.9)])
def test_other_traffic_overrules_what_was_learnt_in_a_few_dozen_steps(old: float, new: float) -> None:
    again = fresh(KeptLearning(learnt_from(taught(old, steps=3000)), 0.0))
    model = goodput(again).choice.models[1]
    rng = np.random.default_rng(0)
    one, head = np.arange(1), np.ones(1, np.int64)
    before = abs(chances(again)[0] - new)
    for n in range(48):
        if n % 12 == 0:
            again.admit(0)  # another answer of the new kind
        kept = np.minimum(rng.geometric(1 - new, 1) - 1, 3)
        goodput(again).learn(view_of(1, 100), Outcomes(one, head, head * 3, kept, 1e-3, 1e-2))
    assert abs(chances(again)[0] - new) < 0.6 * before
    assert model.depth_var[0] < 0.2


def test_what_was_learnt_counts_for_less_after_days() -> None:
    kept = learnt_from(taught(0.8))
    variances = [goodput(fresh(KeptLearning(kept, d))).choice.models[1].depth_var[0] for d in (0.0, 3.0, 1e6)]
    assert variances[0] < variances[1] < variances[2] <= 1.5**2


def test_means_at_their_bounds_can_be_read_again() -> None:
    """Sums of confidences at the bound round to a bit more than it."""
    loop = taught(0.8)
    goodput(loop).choice.models[1].mean_confidence[:] = MAX_LOGIT * (1 + 1e-15)
    assert from_bytes(to_bytes(learnt_from(loop))).acceptance["head"].mean_confidence == [MAX_LOGIT] * DEPTH


def test_too_little_is_not_kept_and_passes_add_up() -> None:
    assert learnt_by(taught(0.8, steps=MIN_PASSES - 1), KEY, "tiny", NOW) is None
    first = learnt_from(taught(0.8, steps=100))
    second = learnt_from(taught(0.8, steps=100), first)
    assert (first.passes, second.passes) == (100, 200)
    assert second.about == "200 passes learnt on 2027-01-15"


def test_what_is_of_another_engine_or_too_old_is_refused() -> None:
    kept = learnt_from(taught(0.8))
    assert KeptLearning.usable(kept, KEY, NOW + 5 * SECONDS_A_DAY).days == pytest.approx(5.0)
    assert KeptLearning.usable(kept, KEY, NOW - 9.0).days == 0.0, "clocks are set back"
    with pytest.raises(ConfigError, match="another model"):
        KeptLearning.usable(kept, "other", NOW)
    with pytest.raises(ConfigError, match="older than"):
        KeptLearning.usable(kept, KEY, NOW + (MAX_AGE_DAYS + 1) * SECONDS_A_DAY)


def test_another_shape_is_left_out() -> None:
    kept = KeptLearning(learnt_from(taught(0.9)), 0.0)
    other = make_loop(PROFILE, ("suffix", "other"), ROWS, [DEPTH, DEPTH], learnt=kept)
    cold = fresh()
    assert chances(other) == pytest.approx(chances(cold))
    shallow = make_loop(PROFILE, NAMES, ROWS, [DEPTH, 3], learnt=kept)
    assert shallow.policy.choice.models[1].max_depth == 3  # type: ignore[attr-defined]


_WHOLE = to_bytes(learnt_from(taught(0.8)))


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        from_bytes(data)


@settings(max_examples=200)
@given(st.data())
def test_a_number_that_cannot_be_is_refused(data: st.DataObject) -> None:
    values = json.loads(_WHOLE)
    wrong = data.draw(st.sampled_from(WRONG))
    where = data.draw(st.sampled_from(["depth_logit", "depth_var", "num_confidences", "log_error", "host_row_s"]))
    home = values["prices"] if where in values["prices"] else values["acceptance"]["head"]
    home[where][data.draw(st.integers(0, len(home[where]) - 1))] = wrong
    with pytest.raises(ConfigError):
        from_bytes(json.dumps(values).encode())


@pytest.mark.parametrize("name", ["host_row_s", "host_seen"])
@pytest.mark.parametrize("given", [[], [0]])
def test_the_hosts_two_prices_are_two(name: str, given: list[int]) -> None:
    """Fewer would not fit a fresh loop, and end the start."""
    values = json.loads(_WHOLE)
    values["prices"][name] = given
    with pytest.raises(ConfigError, match="length"):
        from_bytes(json.dumps(values).encode())


@pytest.mark.parametrize("values", [{}, [], 1, {"of": {}}, {"of": {}, "days": {}}, {"of": {}, "days": 1.0}])
def test_a_trace_without_whole_learning_is_refused(values: object) -> None:
    with pytest.raises(ConfigError):
        KeptLearning.from_json(values)


@pytest.mark.parametrize("days", [float("nan"), float("inf"), -1.0, MAX_AGE_DAYS + 1])
def test_a_trace_of_an_impossible_age_is_refused(days: float) -> None:
    values = KeptLearning(learnt_from(taught(0.8)), 0.0).to_json()
    assert KeptLearning.from_json(values) is not None
    with pytest.raises(ConfigError, match="days old"):
        KeptLearning.from_json(values | {"days": days})


def test_a_file_is_bounded_and_cut_ones_are_refused() -> None:
    assert len(_WHOLE) < MAX_LEARNT_BYTES // 8
    with pytest.raises(ConfigError, match="more than"):
        from_bytes(b" " * MAX_LEARNT_BYTES + _WHOLE)
    for end in range(0, len(_WHOLE) - 1, 97):
        with pytest.raises(ConfigError):
            from_bytes(_WHOLE[:end])


def test_what_was_learnt_says_nothing_of_any_text() -> None:
    """All strings are names that the code gives; all else are numbers."""
    strings: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                strings.add(key)
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)
        elif isinstance(value, str):
            strings.add(value)

    walk(json.loads(_WHOLE))
    fields = set(Learnt.__struct_fields__) | {KEY, "tiny", "paceline learnt 2", *NAMES}
    inner = {"depth_logit", "depth_var", "mean_confidence", "num_confidences", "shared", "ratio", "steps"}
    inner |= {
        "log_error",
        "seen",
        "key_s",
        "draft_factor",
        "draft_steps",
        "host_row_s",
        "host_seen",
        "read_token_s",
    }
    assert {s for s in strings - fields - inner if not s.isdigit()} == set()
