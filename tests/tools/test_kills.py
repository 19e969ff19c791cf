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
    return usual | {"pauses_ms": {"kill": [100]}, "prefill_ms": 30, "seconds": 6.0} | changes


def test_a_pause_is_the_gap_around_the_harm() -> None:
    hits = [Hit("kill", 1.0, "0", frozenset({"a", "b"})), Hit("stop", 1.5, "1", frozenset({"b", "c"}))]
    streams = [
        stream("a", 0.0, 0.9, 1.25, 1.3),
        stream("b", 0.9, 1.2, 3.7, 3.8),
        stream("c", 1.4, 3.5, 3.6),
        stream("d", 0.0, 9.0),  # nobody harmed its replica
    ]
    assert pauses_ms(streams, hits) == {"kill": [350], "twice": [2500], "stop": [2100]}


def test_a_stream_that_had_ended_has_no_pause() -> None:
    assert pauses_ms([stream("a", 0.1, 0.2)], [Hit("end", 5.0, "0", frozenset({"a"}))]) == {"end": [0]}


def test_the_sums_are_of_all_rounds_and_pauses_stand_beside_their_bars() -> None:
    rounds = [line(0), line(1, lost=1, pauses_ms={"kill": [200, 281], "stop": [2600], "twice": [3000]})]
    found = summary(rounds)
    assert (found["kills"], found["a_minute"], found["kill"], found["lost"]) == (4, 20.0, 2, 1)
    assert found["pause_ms"]["kill"] == {
        "p50": 200,
        "p99": 200,
        "max": 281,
        "streams": 3,
        "bar": 250,
        "prefill": 30,
        "over": 1,
    }
    assert found["pause_ms"]["stop"]["over"] == 1
    assert "bar" not in found["pause_ms"]["twice"]
    assert summary([])["kills"] == 0


def test_a_run_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "kills.jsonl"
    assert read_rounds(path) == read_rounds(None) == []
    path.write_text(json.dumps(line(0)) + "\n" + json.dumps(line(1)) + "\n" + '{"round": 2, "ha')
    assert [one["round"] for one in read_rounds(path)] == [0, 1]
    assert path.read_text().count("\n") == 2
    assert len(read_rounds(path)) == 2
