"""Parts of the fleet simulator: prefix caches, deaths, traces, and rules of others."""

from __future__ import annotations

import gzip
import json
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from paceline.control.routing import ReplicaView, RequestView, Router
from paceline.core.errors import ConfigError
from paceline.sim import faults
from paceline.sim.faults import deaths
from paceline.sim.fleet_traces import FleetTrace, read_fleet_trace
from paceline.sim.rival_routes import any_route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.sim.faults import Death

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("spec", "most"), [("60/h", 1), ("exponential:60/h", 1), ("rack:60/h,4", 4), ("waves:60/h,0.5", 32)]
)
def test_deaths_come_as_often_and_as_many_as_told(spec, most) -> None:
    found = until(20 * 3600, deaths(spec, 32, seed=1))
    assert len(found) == pytest.approx(1200, rel=0.1)
    assert [d.at_s for d in found] == sorted(d.at_s for d in found)
    sizes = [len(d.replicas) for d in found]
    assert max(sizes) <= most
    assert np.mean(sizes) == pytest.approx(16 if "waves" in spec else most, rel=0.1)
    assert {r for d in found for r in d.replicas} == set(range(32))
    assert found == until(20 * 3600, deaths(spec, 32, seed=1))


def until(end_s: float, drawn: Iterator[Death]) -> list[Death]:
    """Return the deaths before some time."""
    return [*takewhile(lambda death: death.at_s < end_s, drawn)]


def test_a_rack_is_neighbours_and_the_last_one_may_be_smaller() -> None:
    found = {d.replicas for d in until(3600, deaths("rack:100/h,4", 10))}
    assert found == {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)}


@pytest.mark.parametrize(
    "spec", ["6", "6/d", "0/h", "1e9/h", "rock:6/h", "rack:6/h,0", "waves:6/h,2", "rack:6/h,x"]
)
def test_deaths_that_cannot_be_are_refused(spec) -> None:
    with pytest.raises(ConfigError, match="--deaths"):
        deaths(spec, 4)


def test_replicas_that_die_before_they_can_answer_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "MOST_DEATHS", 2)
    drawn = deaths("6/h", 4)
    assert len({next(drawn).at_s, next(drawn).at_s}) == 2
    with pytest.raises(ConfigError, match="without an answer"):
        next(drawn)


# Traces ------------------------------------------------------------------------------------------


def test_public_traces_are_read() -> None:
    mooncake = read_fleet_trace(SHARED / "mooncake_conversation.jsonl.gz", "mooncake")
    assert len(mooncake) == 12_031
    assert mooncake.page_tokens == 512
    assert mooncake.prompt_lens.mean() == pytest.approx(12_035, abs=1)
    assert all(len(p) == -(-n // 512) for p, n in zip(mooncake.pages, mooncake.prompt_lens.tolist(), strict=True))
    azure = read_fleet_trace(SHARED / "azure2023_code.csv.gz", "azure")
    assert not any(azure.pages)
    assert (np.diff(azure.arrival_s) >= 0).all()
    assert 3000 < azure.arrival_s[-1] < 4000


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("jsonl", ""),
        ("jsonl", "{"),
        ("jsonl", '{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}'),
        ("jsonl", '{"arrival_s": 0, "prompt_tokens": 99999999, "output_tokens": 1}'),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [-1]}'),
        ("mooncake", '{"timestamp": 1e300, "input_length": 5, "output_length": 5}'),
        ("mooncake", '"' + "x" * (1 << 20) + '"'),
        ("azure", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,3,4"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-3,4"),
    ],
)
def test_what_is_no_trace_is_refused(form, text, tmp_path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=str(file)):
        read_fleet_trace(file, form)


@pytest.mark.parametrize("damaged", [lambda whole: whole[:-20], lambda whole: whole[:10] + b"\x07" + whole[11:]])
def test_a_damaged_compressed_file_is_refused(damaged, tmp_path) -> None:
    """Its end is missing, or its first block is of no type that there is."""
    file = tmp_path / "trace.gz"
    line = json.dumps({"arrival_s": 0.0, "prompt_tokens": 1, "output_tokens": 1})
    file.write_bytes(damaged(gzip.compress("\n".join([line] * 100).encode())))
    with pytest.raises(ConfigError, match="no trace"):
        read_fleet_trace(file, "jsonl")


def test_copies_have_pages_of_their_own_and_the_same_hour() -> None:
    lens = np.array([5, 6, 7])
    trace = FleetTrace(np.array([0.0, 10.0, 20.0]), lens, lens, [(0, 1), (0, 2), ()], 4).repeated(3)
    assert len(trace) == 9
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert trace.arrival_s[-1] <= 20.001
    assert sorted(trace.pages) == [(), (), (), (0, 1), (0, 2), (3, 4), (3, 5), (6, 7), (6, 8)]
    assert all(len(p) == (n < 7) * 2 for p, n in zip(trace.pages, trace.prompt_lens.tolist(), strict=True))


# Rules of others ---------------------------------------------------------------------------------


def test_the_gate_of_the_whole_fleet_turns_affinity_off() -> None:
    """With one hot replica, a request leaves even the idle replica that keeps its prompt."""
    route, request = Router(any_route("sglang")), RequestView(1600, range(100))
    calm = [ReplicaView(n, True, "", rows, 0, 1e-4, (), hits) for n, rows, hits in (("a", 9, 90), ("b", 0, 0))]
    assert route.choose(request, calm).replica == "a"
    hot = [*calm, ReplicaView("hot", True, "", 90, 0, 1e-4, (), 0)]
    assert route.choose(request, hot).replica == "b"


def test_known_routes_are_told() -> None:
    with pytest.raises(ConfigError, match=r"seconds.*sglang"):
        any_route("fastest")
