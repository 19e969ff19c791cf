"""`paceline doctor`: check a target and its drafter, and say what speed to expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.bench.terminal import progress, say, table
from paceline.engine.options import add_engine_arguments, engine_config

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable

    from paceline.bench.doctor import Check, Speed
    from paceline.engine.build import Built
    from paceline.engine.config import EngineConfig

ONE_ROW_LEN = 1024  # context of the row that is timed


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--no-measure", action="store_true", help="check only, time nothing")
    add_engine_arguments(parser)


def run(args: Namespace) -> int:
    """Print the diagnosis and a verdict; 1 if something will not work."""
    from paceline.bench.doctor import Check, check_built, diagnose, measure
    from paceline.core.errors import ConfigError, ModelError
    from paceline.draft.options import parse_spec

    config = engine_config(args)
    parse_spec(config.draft)  # a misspelt option is no finding
    checks, error = diagnose(config)
    if error is None and all(c.ok for c in checks):
        try:
            built = _build(config)
            checks += check_built(built)
        except (ConfigError, ModelError) as unfit:
            error = unfit
    if error is not None:
        checks.append(Check("error", False, str(error)))
    table("checks", ["", "what", "found"], list(_lines(checks)), num_left=3)
    if not all(c.ok for c in checks):
        say("Verdict: this will not work; see the lines marked FAIL.")
        return 1
    if args.no_measure:
        say("Verdict: target and drafter fit.")
        return 0
    _print_speed(measure(built, config.draft))
    return 0


def _build(config: EngineConfig) -> Built:
    from paceline.engine.build import build

    with progress(f"loading {config.model}") as update:
        return build(config, lambda _, done, total: update(done, total))


def _lines(checks: Iterable[Check]) -> Iterable[list[str]]:
    for check in checks:
        yield ["ok" if check.ok else "FAIL", check.what, check.text]


def _print_speed(speed: Speed) -> None:
    plain = 1.0 / speed.plain_s
    say(f"One request, greedy, medians of real steps: {1e3 * speed.plain_s:.1f} ms a token, {plain:.1f} tokens/s.")
    if not speed.k:
        say("Verdict: it works; plain decoding, so there is no speculation to judge.")
        return
    say(
        f"A pass that verifies {speed.k} drafts takes {1e3 * speed.verify_s:.1f} ms, "
        f"drafting {1e3 * speed.draft_s:.1f} ms.\n"
    )
    lengths = sorted({1.0, 1.5, 2.0, 3.0, float(speed.k + 1)} | {round(speed.sample_length, 2)})
    rows = [
        [f"{n:.2f}", f"{speed.tokens_per_s(n):.1f}", f"{speed.tokens_per_s(n) / plain:.2f}x"]
        for n in lengths
        if n <= speed.k + 1
    ]
    table("with speculation", ["kept per pass", "tokens/s", "speed-up"], rows)
    say(_verdict(speed))


def _verdict(speed: Speed) -> str:
    least = f"{speed.break_even:.2f} tokens kept per pass of at most {speed.k + 1}"
    if speed.break_even >= speed.k + 1:
        return f"Verdict: it works, but cannot pay on this machine: break-even is at {least}. Try --draft off."
    here = "more" if speed.sample_length > speed.break_even else "less"
    return f"Verdict: it works and pays from {least} on; a sample prompt kept {speed.sample_length:.2f}, {here}."
