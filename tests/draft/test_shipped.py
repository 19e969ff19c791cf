"""What a folder tells of its drafter's training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.draft.shipped import METRICS_FILE, trained_to

if TYPE_CHECKING:
    from pathlib import Path


def test_the_last_look_counts(tmp_path: Path) -> None:
    assert trained_to(tmp_path) == ()
    (tmp_path / METRICS_FILE).write_text('{"accepted": [0.1]}\n{"accepted": [0.7, 0.5, 0.5]}\n')
    assert trained_to(tmp_path) == (0.7, 0.5, 0.5)


NO_SHARES = ["", "{", "[]", *(f'{{"accepted": {shares}}}' for shares in ("[]", "[0.5, 0.6]", "[2]", "[NaN]"))]


@pytest.mark.parametrize("line", NO_SHARES)
def test_what_makes_no_sense_is_unknown(line: str, tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text(line)
    assert trained_to(tmp_path) == ()
