"""What `paceline profile` draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.bench.pictures import draw_profile
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.files import Profile

if TYPE_CHECKING:
    from pathlib import Path

PASS = Curve.of([1, 64], [0.01, 0.02])
DRAFTING = Curve.of([1, 64], [0.001, 0.002])


def test_drafters_that_cost_nothing_are_left_out_of_the_picture(tmp_path: Path) -> None:
    costs = DraftCost(()), DraftCost((DRAFTING,)), DraftCost((DRAFTING, DRAFTING))
    profile = Profile(MeasuredCost(TargetCost(PASS), costs), ("suffix", "shallow", "deep"))
    draw_profile(profile, tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    for label, there in (("suffix", False), ("shallow, 1 deep", True), ("deep, 1 deep", True), ("2 deep", True)):
        assert (label in text) == there, label
