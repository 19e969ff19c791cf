"""Routes of a fleet's operators: who may use them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from paceline.control.online_cost import Predictions
from paceline.engine.gauges import Gauges
from paceline.engine.stats import Stats
from paceline.serve.api.keys import KeyRing, new_key
from paceline.serve.app import make_app
from paceline.serve.fleet.engine_fleet import EngineFleet
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.observe.engine_log import tell_doings
from paceline.serve.tokenizer_cache import TokenizerCache
from paceline.serve.worker.messages import Snapshot
from tests.serve.fleet.fake_engines import FakeEngines

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {role: new_key(role, role) for role in ("all", "admin", "metrics")}


@pytest.mark.parametrize(
    ("name", "status"), [("all", 403), ("metrics", 403), ("admin", 200), ("sesame", 200), ("wrong", 401)]
)
def test_only_admins_operate_a_fleet(name: str, status: int, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("".join(f"{stored.line}\n" for _, stored in KEYS.values()))
    key = KEYS[name][0] if name in KEYS else name
    assert _drained(KeyRing("sesame", path), key) == [status, status, 400 if status == 200 else status]


def test_a_server_without_keys_lets_its_user_operate_the_fleet() -> None:
    assert _drained(None, "none") == [200, 200, 400]


def _drained(ring: KeyRing | None, key: str) -> list[int]:
    """Statuses of the table, of a drain, and of a move of a request that is not open."""

    async def scenario() -> list[int]:
        fleet = EngineFleet(ReplicaOptions(replicas=2))
        for name in ("0", "1"):
            fleet.add(name, FakeEngines())
        app, _ = make_app(fleet, TokenizerCache(), ring, page=False)
        transport, headers = httpx.ASGITransport(app), {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
            answers = [
                await http.get("/v1/fleet"),
                await http.post("/v1/fleet/drain", json={"replica": "0"}),
                await http.post("/v1/fleet/move", json={"replica": "0", "request": "none"}),
            ]
        assert fleet.members["0"].draining == (answers[1].status_code == 200)
        await fleet.stop()
        return [answer.status_code for answer in answers]

    return asyncio.run(scenario())


def test_the_speeds_of_replicas_add_up(caplog: pytest.LogCaptureFixture) -> None:
    """Each of two replicas writes 40 tokens in each second of its steps."""

    async def scenario() -> dict[str, Any]:
        fleet = EngineFleet(ReplicaOptions(replicas=2))
        replicas = [FakeEngines() for _ in range(2)]
        for name, engines in enumerate(replicas):
            fleet.add(str(name), engines)
        _, state = make_app(fleet, TokenizerCache(), page=False)
        predictions = Predictions(step_s=3.0, plain_s=6.0)
        worked = Stats(steps=60, step_s=3.0, output_tokens=120, predictions=predictions)

        async def tell(stats: Stats) -> None:
            for engines in replicas:
                engines.snapshot = Snapshot(stats, Gauges.none())
                engines.on_snapshot(engines.snapshot)
            while (whole := state.metrics.recent.newest) is None or whole.stats.steps != 2 * stats.steps:
                await asyncio.sleep(0.01)  # the fleet sums at looks

        await tell(Stats())
        telling = asyncio.create_task(tell_doings(state.metrics.recent, every_s=1.0))
        await asyncio.sleep(0.1)  # the window is later than the wait by its own time
        await tell(worked)
        while not caplog.records:
            await asyncio.sleep(0.01)
        telling.cancel()
        await fleet.stop()
        return state.metrics.recent.figures()

    with caplog.at_level("INFO", "paceline.doings"):
        figures = asyncio.run(scenario())
    assert (figures["tokens_per_s"], figures["plain_tokens_per_s"]) == (80.0, 40.0)
    assert "80.0 tok/s, " in caplog.records[0].message
