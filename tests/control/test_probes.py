"""Checks of what could pay."""

from __future__ import annotations

from paceline.control.probes import CHECK_EVERY, Probes


def test_a_check_is_due_now_and_then() -> None:
    due = [step for step in range(1, 3 * CHECK_EVERY) if Probes().check_is_due(step)]
    assert due == [CHECK_EVERY, 2 * CHECK_EVERY]
