"""Fuzz one target: `python -m tests.fuzz TARGET [--minutes N]`, guided by coverage where atheris is installed.

The border's compiled code has no coverage for atheris, and its end is that of the process: it is called in
children, whose seeds are told if one of them dies.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

ROUND = 500  # inputs of one child


def main() -> int:
    """Fuzz as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--random", action="store_true", help="do without atheris")
    args = parser.parse_args()
    if args.target == "border" or args.random:
        return in_children(args.target, args.minutes)
    return guided(args.target, args.minutes, args.corpus / args.target)


def guided(name: str, minutes: float, corpus: Path) -> int:
    """Fuzz with atheris; new inputs stay in the corpus, one that fails in the file that is named."""
    import atheris

    with atheris.instrument_imports(include=["paceline", "json"]):
        from tests.fuzz import targets
        from tests.fuzz.seeds import seeds
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(name)):
        targets.run(name, data)  # what is imported late takes long, which the fuzzer would call a hang
        (corpus / f"seed-{number}").write_bytes(data)
    flags = [f"-max_total_time={int(minutes * 60)}", "-max_len=200000", "-timeout=120", "-rss_limit_mb=4096"]
    flags += ["-print_final_stats=1", "-close_fd_mask=0", f"-artifact_prefix={corpus.parent}/{name}-"]
    atheris.Setup([sys.argv[0], str(corpus), *flags], lambda data: targets.run(name, data))
    atheris.Fuzz()
    return 0


def in_children(name: str, minutes: float) -> int:
    """Fuzz with random changes in forked children; return 1 after one that died."""
    from tests.fuzz import targets
    from tests.fuzz.seeds import changed, seeds

    seeds(name)
    end_s, num_runs, num_dead = time.monotonic() + 60 * minutes, 0, 0
    while time.monotonic() < end_s:
        first = num_runs
        child = os.fork()
        if child == 0:
            for seed in range(first, first + ROUND):
                draw = random.Random(seed)
                targets.run(name, changed(draw.choice(seeds(name)), draw) + draw.randbytes(draw.randrange(200)))
            os._exit(0)
        num_runs += ROUND
        if status := os.waitpid(child, 0)[1]:
            num_dead += 1
            _say(f"{name}: a child ended with {status}; its seeds were {first} to {first + ROUND}")
    _say(f"{name}: {num_runs} inputs, {num_dead} children died")
    return int(num_dead > 0)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
