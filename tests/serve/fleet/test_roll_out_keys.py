"""Commands of trainers: who may send them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from paceline.serve.api.keys import KeyRing, new_key
from paceline.serve.api.roll_outs import ABOUT, RollOuts
from paceline.serve.app import make_app
from paceline.serve.operation import OperationOptions
from paceline.serve.tokenizer_cache import TokenizerCache
from tests.serve.fleet.fake_engines import FakeEngines

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {role: new_key(role, role) for role in ("all", "admin")}


@pytest.mark.parametrize("role", KEYS)
def test_only_admins_command_the_engine(role: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("".join(f"{stored.line}\n" for _, stored in KEYS.values()))

    async def scenario() -> dict[str, int]:
        engine = FakeEngines()
        commands = {r.path: r for r in RollOuts(engine).routes()}
        rl = OperationOptions(rl=True)
        app, _ = make_app(engine, TokenizerCache(), KeyRing(None, path), page=False, operation=rl)
        transport, headers = httpx.ASGITransport(app), {"authorization": f"Bearer {KEYS[role][0]}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
            return {
                name: (await http.request("GET" if "POST" not in route.methods else "POST", name)).status_code
                for name, route in commands.items()
                if route.methods is not None
            }

    found = asyncio.run(scenario())
    reads = {"/get_weight_version", *ABOUT}
    assert {found[name] for name in reads} == {200}
    refused = {name for name, status in found.items() if status == 403}
    assert refused == (set() if role == "admin" else set(found) - reads)
