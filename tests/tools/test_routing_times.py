"""The tool that times routing decisions."""

from __future__ import annotations

import pytest
from tools.measure import routing

from paceline.control.routing import ROUTES


def test_every_route_and_size_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["routing", "--sizes", "2,9", "--decisions", "20"])
    monkeypatch.setattr(routing, "SETTLING", 3)
    assert routing.main() == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title == "20 decisions"
    assert [line.split()[:2] for line in lines if line] == [
        [route, size] for route in ROUTES for size in ("2", "9")
    ]
    assert all(float(cell) > 0 for line in lines if line for cell in line.split()[2:])
