"""The load of the front's measure: its place in flight, what it counts. Its server is a function here."""

from __future__ import annotations

import argparse
import asyncio

import httpx
import pytest
from tools.measure import front_cost
from tools.measure.front_cost import SteadyLoad, share_within

SECONDS_A_TOKEN = 0.002


@pytest.mark.parametrize(
    ("begin_s", "ended_s", "tokens"),
    [(0, 4, 10), (1, 2, 10), (0.5, 1.5, 5), (2, 4, 5), (0, 1, 0), (3, 9, 0)],
)
def test_an_answers_tokens_count_as_far_as_they_came_in_the_time(
    begin_s: float, ended_s: float, tokens: float
) -> None:
    total = {(0, 4): 20}.get((begin_s, ended_s), 10)
    assert share_within(1, 3, begin_s, ended_s, total) == tokens


def test_a_load_keeps_its_places_full_until_its_time_has_been_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight: dict[str, int] = {"one": 0, "two": 0}
    seen: list[tuple[int, int]] = []

    async def answer(_: httpx.AsyncClient, url: str, __: int, max_tokens: int) -> int:
        in_flight[url] += 1
        seen.append((in_flight["one"], in_flight["two"]))
        await asyncio.sleep(SECONDS_A_TOKEN * max_tokens)
        in_flight[url] -= 1
        return max_tokens

    async def rate() -> float:
        async with httpx.AsyncClient() as client:
            return await load.tokens_per_s(client, 0)

    monkeypatch.setattr(front_cost, "whole_answer", answer)
    load = SteadyLoad(("one", "two"), 6, argparse.Namespace(whole=True, seconds=0.5, tokens=20))
    assert 0 < asyncio.run(rate()) <= 6 / SECONDS_A_TOKEN
    assert max(seen) == (3, 3)
    assert {tokens for *_, tokens in load.answers} <= set(range(10, 31))
    assert load.late == 6
