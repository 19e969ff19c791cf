"""The file of vLLM's Dynamic SD proposal: every field, both ways, and its choices through a staircase."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.control.costs import H100
from tests.control.test_allocation import PROFILE, RATES, candidates_of, uniform

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TableCost, TargetCost, non_negative
from paceline.control.files import Profile, from_json, read_profile, write_profile
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import Work
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SEED: dict[str, Any] = json.loads(H100.read_text())
CONTEXT = 600  # tokens of each row's text
KS = (0, 1, 3, 5)


@pytest.mark.parametrize("others", [{}, {"warmup_steps": 10}, {"is_online": True, "a_field_to_come": [1]}])
def test_every_field_comes_back(tmp_path: Path, others: dict[str, Any]) -> None:
    document = SEED | others
    given, copy = tmp_path / "given.json", tmp_path / "copy.json"
    given.write_text(json.dumps(document))
    profile = read_profile(given)
    write_profile(copy, profile)
    written = json.loads(copy.read_text())
    assert set(written) == set(document)
    for name in set(document) - {"batch_stats"}:
        assert written[name] == document[name]
    assert set(written["batch_stats"]) == set(document["batch_stats"])
    for rows, by_k in document["batch_stats"].items():
        assert written["batch_stats"][rows] == pytest.approx(by_k, rel=1e-15)
    again = read_profile(copy)
    assert (again.accepted_at, again.about, again.max_k) == (profile.accepted_at, profile.about, 5)


def test_fields_that_decide_nothing_are_named_with_the_reason() -> None:
    lines = from_json(SEED | {"warmup_steps": 10, "surprise": {"a": 1}}).unused
    assert [line.partition(" is not used: ")[0] for line in lines] == [
        "is_online (false)",
        "warmup_steps (10)",
        'surprise ({"a": 1})',
    ]
    assert all(line.partition(" is not used: ")[2] for line in lines)
    own = Profile(MeasuredCost(TargetCost(Curve.of([1], [1.0])), ()), about={"is_online": False})
    assert (own.unused, own.max_k) == ((), None)


@pytest.mark.parametrize(
    "field",
    [
        {"max_num_speculative_tokens": 0},
        {"max_num_speculative_tokens": True},
        {"max_num_speculative_tokens": 10**9},
        {"max_num_speculative_tokens": None},
        {"warmup_steps": -1},
        {"warmup_steps": 1.5},
        {"is_online": "no"},
        {"batch_stats": {"1": {"0": 0.0, "1": 1.0}}},
    ],
)
def test_fields_that_cannot_be_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not a profile"):
        from_json(SEED | field)


def through_buckets(table: TableCost) -> MeasuredCost:
    """Split whole steps into a staircase over tokens, a price of each row's text, and a price of a draft pass."""
    cells = [
        (int(rows), int(k), float(curve.seconds[i]))
        for k, curve in zip(table.ks, table.by_rows, strict=True)
        for i, rows in enumerate(curve.counts)
    ]
    buckets = sorted({rows * (1 + k) for rows, k, _ in cells})
    parts = np.array([[*(float(rows * (1 + k) >= b) for b in buckets), rows, k] for rows, k, _ in cells])
    seconds = np.array([s for *_, s in cells])
    *rises, row_s, draft_s = non_negative(parts / seconds[:, None], np.ones(len(cells))).tolist()
    assert parts @ [*rises, row_s, draft_s] == pytest.approx(seconds, rel=0.02)
    passes = TargetCost(Curve.of(buckets, np.cumsum(rises).tolist(), stepped=True), kv_token_s=row_s / CONTEXT)
    return MeasuredCost(passes, (DraftCost(tuple(Curve.of([1, 256], [draft_s * k] * 2) for k in range(1, 6))),))


def decoding(rows: int) -> tuple[Work, np.ndarray, np.ndarray]:
    return Work(rows, 0, CONTEXT * rows, CONTEXT * rows), np.full(rows, CONTEXT), np.zeros(rows, np.int64)


def goodput(cost: OnlineCost, rows: int, k: int) -> float:
    work, lengths, drafters = decoding(rows)
    return rows * (1 + RATES[:k].sum()) / cost.price(work, lengths, np.full(rows, k), drafters)


def test_the_published_choices_hold_where_passes_cost_what_their_buckets_do() -> None:
    assert isinstance(PROFILE.cost, TableCost)
    cost = OnlineCost(through_buckets(PROFILE.cost))
    chosen = {rows: max(KS, key=lambda k: goodput(cost, rows, k)) for rows in (1, 4, 16, 64, 256)}
    assert chosen == {1: 3, 4: 3, 16: 3, 64: 1, 256: 0}
    for rows in chosen:
        work, lengths, _ = decoding(rows)
        found = cost.allocate(work, candidates_of(uniform(rows), lengths))
        assert found.tokens / found.seconds >= goodput(cost, rows, chosen[rows]) * (1 - 1e-9)
        if rows < 256:
            assert (found.ks == chosen[rows]).all()


def test_rows_of_different_depth_fill_a_bucket() -> None:
    """At 256 rows no K for all rows pays, but half of them may have a draft: the pass is then just full."""
    assert isinstance(PROFILE.cost, TableCost)
    parts = through_buckets(PROFILE.cost)
    work, lengths, _ = decoding(256)
    found = OnlineCost(parts).allocate(work, candidates_of(uniform(256), lengths))
    assert parts.target.by_tokens.bucket(256 + int(found.ks.sum())) == 256 + found.ks.sum() == 384


def test_more_drafts_never_take_less_time_where_noise_says_so() -> None:
    cost = from_json(SEED | {"batch_stats": {"1": {"0": 6.5, "1": 9.9, "2": 7.0}}}).cost
    assert isinstance(cost, TableCost)
    assert cost.seconds(1, np.arange(5.0)) == pytest.approx([6.5e-3, *[9.9e-3] * 4])


def test_a_staircase_names_the_step_that_a_count_pays_for() -> None:
    stairs = Curve.of([1, 8, 16], [1.0, 1.6, 3.2], stepped=True)
    assert [stairs.bucket(n) for n in (1, 2, 8, 9, 16, 17)] == [1, 8, 8, 16, 16, None]
    assert Curve.of([1, 8], [1.0, 1.6]).bucket(1) is None
