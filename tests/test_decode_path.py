"""A decode step touches few files: a budget, because a rule that CI does not check is a wish."""

from __future__ import annotations

import pytest

from tests.decode_path import BUDGETS, decode_path, num_lines, over_budget


@pytest.mark.parametrize("draft", BUDGETS)
def test_a_decode_step_keeps_within_its_budget_of_files_and_lines(draft: str) -> None:
    assert over_budget(draft, BUDGETS[draft]) is None


def test_a_path_over_its_budget_is_found_with_its_files() -> None:
    files = decode_path("off")
    exact = len(files), num_lines(files)
    assert over_budget("off", exact) is None
    for budget in ((exact[0] - 1, exact[1]), (exact[0], exact[1] - 1)):
        said = over_budget("off", budget)
        assert said is not None
        assert "engine/scheduler.py" in said
        assert f"{exact[0]} files of {budget[0]}, {exact[1]} lines of {budget[1]}" in said


def test_the_path_has_the_step_and_not_the_start() -> None:
    files = decode_path("off")
    assert {"engine/step.py", "engine/scheduler.py", "verify/coupled.py"} <= set(files)
    assert not [
        file for file in files if file.startswith(("engine/assembly", "engine/engine", "model/files", "serve"))
    ]


def test_each_way_of_drafting_adds_to_plain_decoding() -> None:
    plain, fixed, auto = map(set, map(decode_path, BUDGETS))
    assert not [file for file in plain if file.startswith("draft/")]
    assert "draft/heads/head_drafter.py" in fixed
    assert fixed - {"control/fixed.py", "core/params.py"} <= auto, "auto drafts with the same head"
    assert "draft/lookup/suffix.py" in auto, "and with a lookup drafter"
