"""Options of a fleet, and cores dealt out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.system import core_groups, deal, usable_cores
from paceline.engine.assembly.config import EngineConfig
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.fleet.local import replica_config
from paceline.serve.fleet.member import ranges


@pytest.mark.parametrize(
    "bad",
    [
        {"replicas": 0},
        {"replicas": 257},
        {"resume": "maybe"},
        {"hedge": "p50"},
        {"audit": 1.5},
        {"audit": float("nan")},
        {"resume_wait_s": -1.0},
        {"resume_wait_s": float("nan")},
        {"route": "random"},
        {"cores": "0-3,4-7", "replicas": 3},
        {"cores": "3-0"},
        {"cores": "a"},
        {"cores": "0-99999999999"},
        {"cores": ""},
    ],
)
def test_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ReplicaOptions(**bad)


def test_cores_that_this_process_may_not_use_are_refused() -> None:
    missing = max(usable_cores()) + 1
    with pytest.raises(ConfigError, match="may not use"):
        ReplicaOptions(cores=str(missing)).dealt()


def test_groups_of_cores() -> None:
    assert core_groups("0-2,5") == [frozenset({0, 1, 2}), frozenset({5})]
    assert [ranges(group) for group in core_groups("0-2,5")] == ["0-2", "5"]
    assert ranges(frozenset({0, 1, 4})) == "0-1+4"


def two_nodes(cores_each: int) -> dict[int, tuple[int, ...]]:
    """Two nodes whose cores have alternating numbers, and each physical core two of them."""
    return {core: (core % 2, 0, core % (2 * cores_each) // 2) for core in range(4 * cores_each)}


def test_nodes_and_physical_cores_stay_together() -> None:
    place = two_nodes(4)
    dealt = deal(4, frozenset(place), place)
    assert [len(group) for group in dealt] == [4] * 4
    for group in dealt:
        assert len({place[core][0] for core in group}) == 1
        assert len({place[core] for core in group}) == 2


@given(st.integers(1, 40), st.frozensets(st.integers(0, 40), min_size=1), st.integers(1, 3))
def test_every_replica_has_cores_and_shares_them_only_in_want(
    replicas: int, cores: frozenset[int], nodes: int
) -> None:
    dealt = deal(replicas, cores, {core: (core % nodes, 0, core) for core in cores})
    assert len(dealt) == replicas
    assert all(dealt)
    assert frozenset().union(*dealt) <= cores
    if replicas <= len(cores):
        assert sum(map(len, dealt)) == len(cores) == len(frozenset().union(*dealt))


def test_more_replicas_than_cores_share_all_cores() -> None:
    cores = usable_cores()
    crowded = ReplicaOptions(replicas=len(cores) + 1)
    assert crowded.dealt() == [cores] * (len(cores) + 1)
    assert not ReplicaOptions(replicas=len(cores)).crowded
    named = ReplicaOptions(replicas=len(cores) + 1, cores=",".join([str(min(cores))] * (len(cores) + 1)))
    assert named.dealt() == [frozenset({min(cores)})] * (len(cores) + 1)


def test_replicas_share_memory_and_disk_but_no_files() -> None:
    engine = EngineConfig(kv_disk="/pages", kv_disk_bytes=10 << 20, trace="trace.jsonl")
    configs = [replica_config(engine, number, 4) for number in range(4)]
    assert {config.sharers for config in configs} == {4}
    assert sum(config.kv_disk_bytes for config in configs) == engine.kv_disk_bytes
    assert len({config.kv_disk for config in configs}) == len({config.trace for config in configs}) == 4
    plain = replica_config(EngineConfig(), 1, 2)
    assert plain.kv_disk is plain.trace is None
