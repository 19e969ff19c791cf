"""Time of a routing decision: `python -m tools.measure.routing`.

Fleets of several sizes have random loads, and every tenth replica keeps some of a prompt's pages. Times are of
`Router.choose`, and of the processor besides: where others work on the machine, only the latter says much.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from itertools import product
from time import perf_counter, thread_time

import numpy as np

from paceline.control.routing import ROUTES, ReplicaView, RequestView, Router, policy_named
from paceline.serve.terminal.display import plain_table

SETTLING = 200  # decisions before those that are timed
STEPS = tuple(0.01 + 1e-4 * rows for rows in range(64))
PROMPT_PAGES = 250


def views(rng: np.random.Generator, size: int) -> list[ReplicaView]:
    """Return a fleet with random loads."""
    rows, backlog = rng.integers(0, 64, size).tolist(), rng.integers(0, 40_000, size).tolist()
    hits = (rng.integers(0, PROMPT_PAGES, size) * (rng.random(size) < 0.1)).tolist()
    return [
        ReplicaView(f"replica-{i}", True, "key", rows[i], backlog[i], 2e-4, STEPS, hits[i]) for i in range(size)
    ]


def decision_times(route: str, size: int, count: int) -> np.ndarray:
    """Return clock and processor seconds of decisions. [count, 2]"""
    rng, router = np.random.default_rng(0), Router(policy_named(route))
    fleets = [views(rng, size) for _ in range(8)]
    found = np.zeros((SETTLING + count, 2))
    for index in range(len(found)):
        pages = [b"system", *(b"%d.%d" % (index % 100, i) for i in range(PROMPT_PAGES - 1))]
        request = RequestView(16 * PROMPT_PAGES, pages, frozenset(["replica-1"]), "key")
        begin = perf_counter(), thread_time()
        router.choose(request, fleets[index % len(fleets)])
        found[index] = perf_counter() - begin[0], thread_time() - begin[1]
    return found[SETTLING:]


def main() -> int:
    """Print the times of every route and size."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="64,1000", metavar="N[,N...]", help="replicas")
    parser.add_argument("--decisions", type=int, default=2000, metavar="N")
    args = parser.parse_args()
    cells = []
    for route, size in product(ROUTES, map(int, args.sizes.split(","))):
        ms = 1e3 * decision_times(route, size, args.decisions)
        figures = (*np.percentile(ms[:, 0], [50, 99]), *np.percentile(ms[:, 1], [50, 99]))
        cells.append((route, str(size), *(f"{f:.3f}" for f in figures)))
    columns = ("route", "replicas", "ms p50", "p99", "of the processor p50", "p99")
    sys.stdout.write(plain_table(f"{args.decisions} decisions", columns, cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
