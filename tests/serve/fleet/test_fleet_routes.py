"""Routes of a fleet's operators: who may use them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from paceline.serve.api.keys import KeyRing, new_key
from paceline.serve.app import make_app
from paceline.serve.fleet.engine_fleet import EngineFleet
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.tokenizer_cache import TokenizerCache
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
