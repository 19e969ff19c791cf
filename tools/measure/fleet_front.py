"""CPU time of a fleet's front: a routing decision, and a token through the journal.

    python -m tools.measure.fleet_front [--replicas 64] [--requests 2000]

No engine runs: the replicas are fakes of the tests, which say what they are told. Prompts share prefixes, as
conversations do.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from time import process_time

from tests.serve.fleet.fake_engines import FakeEngines

from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.serve.fleet.engine_fleet import EngineFleet
from paceline.serve.fleet.fleet_options import ReplicaOptions

SHARED, OWN, MANY = 1024, 512, 32  # tokens of a shared prefix; tokens behind it; number of prefixes
TOKENS = 1000  # through the journal, one in each outcome


def prompts(count: int) -> list[tuple[int, ...]]:
    """Return prompts with shared prefixes."""
    chance = random.Random(0)  # noqa: S311 - no secret
    shared = [tuple(chance.randrange(32_000) for _ in range(SHARED)) for _ in range(MANY)]
    return [(*chance.choice(shared), *(chance.randrange(32_000) for _ in range(OWN))) for _ in range(count)]


async def routing_s(replicas: int, requests: int) -> list[float]:
    """Return the seconds of each request's way to its replica, hashes of pages included."""
    fleet = EngineFleet(ReplicaOptions())
    for index in range(replicas):
        fleet.add(str(index), FakeEngines())
    await asyncio.sleep(0)
    found = []
    for index, prompt_ids in enumerate(prompts(requests)):
        begin_s = process_time()
        await fleet.submit([Request(str(index), prompt_ids, SamplingParams(max_tokens=9), 1)], lambda _: None)
        found.append(process_time() - begin_s)
    await fleet.stop()
    return found


async def journal_s() -> float:
    """Return an outcome's seconds in the front, beyond what the fake takes."""
    fleet, engines = EngineFleet(ReplicaOptions()), FakeEngines()
    fleet.add("0", engines)
    await asyncio.sleep(0)
    params = SamplingParams(max_tokens=TOKENS + 1)
    await fleet.submit([Request("r", (1, 2, 3), params, 1)], lambda _: None)
    answer = fleet._legs.journal.open["r"]
    (leg,) = answer.legs
    outcomes = [engines.rows["r"].more(1) for _ in range(TOKENS)]
    begin_s = process_time()
    for outcome in outcomes:
        fleet._on_event(answer, leg, (0, outcome))
    seconds = (process_time() - begin_s) / TOKENS
    await fleet.stop()
    return seconds


def main() -> int:
    """Write the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    found = sorted(asyncio.run(routing_s(args.replicas, args.requests)))
    p50, p99 = (1e3 * found[int(share * (len(found) - 1))] for share in (0.5, 0.99))
    sys.stdout.write(f"CPU time of a request to {args.replicas} replicas: p50 {p50:.3f} ms, p99 {p99:.3f} ms\n")
    sys.stdout.write(f"CPU time of an outcome through the journal: {1e6 * asyncio.run(journal_s()):.1f} us\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
