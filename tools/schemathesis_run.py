"""Requests by schemathesis, right and wrong ones, against a server's own OpenAPI document.

    python -m tools.schemathesis_run --examples 1000

Without `--url` a server over the tiny model is started. Ends with an error if an answer is a 5xx, has a status or
a form that the document does not tell, or if the server is not healthy at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import httpx

from tools.tiny_server import tiny_server

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
NEVER_ENDS = "/v1/speculation/live"  # a stream for as long as the client stays
SHORT = ("--max-len", "160")  # so that an answer without max_tokens ends soon


def attack(url: str, examples: int, seed: int, mode: str) -> int:
    """Send the requests and return the exit status."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", CHECKS]
    command += ["--mode", mode, "--max-examples", str(examples), "--seed", str(seed), "--no-color"]
    command += ["--exclude-path", NEVER_ENDS, "--continue-on-failure", "--request-timeout", "60", "--no-shrink"]
    command += ["--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all", "--warnings", "off"]
    done = subprocess.run(command, check=False)  # noqa: S603 - our own words
    health = httpx.get(f"{url}/health", timeout=30).status_code
    sys.stdout.write(f"mode {mode}: exit {done.returncode}; health afterwards: {health}\n")
    return done.returncode or int(health != 200)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--examples", type=int, default=300, help="requests of each route, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=("positive", "negative", "all"), default="all")
    args = parser.parse_args()
    if args.url:
        return attack(args.url, args.examples, args.seed, args.mode)
    with tiny_server(*SHORT) as url:
        return attack(url, args.examples, args.seed, args.mode)


if __name__ == "__main__":
    sys.exit(main())
