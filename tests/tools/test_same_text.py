"""Promise 1 on the default model, in small: `python -m tools.same_text` is the whole of it."""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import combinations, product
from typing import TYPE_CHECKING

import pytest
from tools.same_text import CHOICES, EngineSetting, covering, main

if TYPE_CHECKING:
    from pathlib import Path


def test_every_pair_of_values_is_covered() -> None:
    settings = list(covering(CHOICES))
    for a, b in combinations([f.name for f in fields(EngineSetting)], 2):
        seen = {(getattr(s, a), getattr(s, b)) for s in settings}
        impossible = {(1, True)} if (a, b) == ("rows", "preempt") else set()
        assert seen == set(product(CHOICES[a], CHOICES[b])) - impossible
    assert len(settings) < 45


@pytest.mark.default_model
@pytest.mark.slow
def test_a_real_model_writes_the_same_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--limit", "4", "--max-tokens", "24", "--weights", "int8,int4"]
    arguments += ["--keep", str(tmp_path)]
    assert main(arguments) == 0
    assert "0 answers differed" in capsys.readouterr().out
    kept = next(f for f in tmp_path.iterdir() if f.name.startswith("int4_eagle3"))
    endings, preemptions = json.loads(kept.read_text())
    next(iter(endings.values()))[0][3] += 1  # a run that is interrupted goes on; what was kept is compared too
    kept.write_text(json.dumps((endings, preemptions)))
    assert main(arguments) == 1
    assert "1 answers differed" in capsys.readouterr().out
