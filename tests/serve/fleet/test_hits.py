"""Prefix hits of two replicas beside those of one: counted, not timed."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.serve.conftest import running
from tests.serve.test_faults import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serve.conftest import Server

PREFIXES, EACH = 8, 6
PREFIX_TOKENS, OWN_TOKENS = 96, 16
ENOUGH = 0.9


def prompts() -> list[list[int]]:
    """Token ids: each prompt begins like five others, in an order without a pattern."""
    chance = Random(3)
    stems = [[chance.randrange(256) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    found = [stem + [chance.randrange(256) for _ in range(OWN_TOKENS)] for stem in stems for _ in range(EACH)]
    chance.shuffle(found)
    return found


def hit_rate(server: Server) -> float:
    """Share of prompt tokens that were cached. One request at a time, so that no count depends on time."""
    with server.client() as client:

        def cached(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
            found: int = usage["prompt_tokens_details"]["cached_tokens"]
            return found

        found = list(map(cached, prompts()))
    return sum(found) / (len(found) * (PREFIX_TOKENS + OWN_TOKENS))


def are_up(server: Server, replicas: str) -> bool:
    """True if all take requests; one alone is no fleet."""
    with server.client() as client:
        return replicas == "1" or [r["state"] for r in client.get("/v1/fleet").json()["replicas"]] == ["up"] * 2


def test_two_replicas_find_as_much_in_their_caches_as_one(model: Path) -> None:
    rates = {}
    for replicas in ("1", "2"):
        with running(model, "--replicas", replicas) as server:
            assert eventually(partial(are_up, server, replicas))
            rates[replicas] = hit_rate(server)
    assert rates["1"] > 0.5
    assert rates["2"] >= ENOUGH * rates["1"], rates
