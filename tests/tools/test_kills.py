"""The run of kills: pauses by kind, lines that a later run goes on from. No server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tools.measure.kills import Hit, TimedStream, pauses_ms, read_rounds, summary

if TYPE_CHECKING:
    from pathlib import Path


def stream(name: str, *chunk_s: float) -> TimedStream:
    return TimedStream(name=name, chunk_s=list(chunk_s))


def line(number: int, **changes: Any) -> dict[str, Any]:
    usual = {"round": number, "harms": ["kill", "stop"], "requests": 8, "resumed": 3, "lost": 0, "different": 0}
    return usual | {"pauses_ms": {"kill": [(100, 90)]}, "seconds": 6.0} | changes


def test_a_pause_is_the_gap_around_the_harm() -> None:
    hits = [
        Hit("kill", 1.0, "0", frozenset({"a", "b"}), tokens=100, others=2),
        Hit("stop", 1.5, "1", frozenset({"b", "c"}), tokens=50, others=1),
    ]
    streams = [
        stream("a", 0.0, 0.9, 1.25, 1.3),
        stream("b", 0.9, 1.2, 3.7, 3.8),
        stream("c", 1.4, 3.5, 3.6),
        stream("d", 0.0, 9.0),  # nobody harmed its replica
    ]
    assert pauses_ms(streams, hits, [0.0, 0.002, 0.001]) == {
        "kill": [(350, 250)],
        "twice": [(2500, 2400)],
        "stop": [(2100, 2000)],
    }


def test_a_stream_that_had_ended_has_no_pause() -> None:
    hits = [Hit("end", 5.0, "0", frozenset({"a"}), tokens=9)]
    assert pauses_ms([stream("a", 0.1, 0.2)], hits, [0.0, 0.001]) == {"end": [(0, 0)]}


def test_the_sums_are_of_all_rounds_and_pauses_stand_beside_their_bars() -> None:
    late = {"kill": [(200, 190), (281, 251)], "stop": [(2600, 2490)], "twice": [(3000, 2900)]}
    rounds = [line(0), line(1, lost=1, pauses_ms=late)]
    found = summary(rounds)
    assert (found["kills"], found["a_minute"], found["kill"], found["lost"]) == (4, 20.0, 2, 1)
    assert found["pause_ms"]["kill"] == {
        "streams": 3,
        "whole": {"p50": 200, "p99": 200, "max": 281},
        "beyond_prefill": {"p50": 190, "p99": 190, "max": 251},
        "bar": 250,
        "over": 1,
    }
    assert found["pause_ms"]["stop"]["over"] == 0
    assert "bar" not in found["pause_ms"]["twice"]
    assert summary([])["kills"] == 0


def test_a_run_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "kills.jsonl"
    assert read_rounds(path) == read_rounds(None) == []
    path.write_text(json.dumps(line(0)) + "\n" + json.dumps(line(1)) + "\n" + '{"round": 2, "ha')
    assert [one["round"] for one in read_rounds(path)] == [0, 1]
    assert path.read_text().count("\n") == 2
    assert len(read_rounds(path)) == 2
