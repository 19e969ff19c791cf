"""`paceline doctor`: check a target and its drafter, and say what speed to expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.serve.terminal.display import progress, say, table

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable

    from paceline.bench.doctor import Check, Speed
    from paceline.bench.trial import Expected, Trial
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--no-measure", action="store_true", help="check only, time nothing")
    add_engine_arguments(parser)


def run(args: Namespace) -> int:
    """Print the diagnosis and a verdict; 1 if something will not work."""
    from paceline.bench.doctor import Check, check_built, diagnose, measure
    from paceline.core.errors import ConfigError, ModelError
    from paceline.draft.registry import parse_drafters
    from paceline.engine.assembly.build import assemble

    config = engine_config(args)
    drafters = parse_drafters(config.draft)  # a misspelt option is no finding
    checks, error = diagnose(config)
    if error is None and all(c.ok for c in checks):
        try:
            loaded = _load(config)
            built = assemble(config, loaded)
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
    if not drafters.configs:
        say("Verdict: it works; plain decoding, so there is no speculation to judge.")
        return 0
    del built  # and its KV: the trial has engines of its own
    _print_trial(_try_out(config, loaded))
    return 0


def _load(config: EngineConfig) -> Loaded:
    from paceline.engine.assembly.build import load

    with progress(f"loading {config.model}") as update:
        return load(config, lambda _, done, total: update(done, total))


def _try_out(config: EngineConfig, loaded: Loaded) -> Trial:
    from paceline.bench.trial import num_requests, try_out

    with progress("trying twenty prompts, with speculation and without") as update:
        return try_out(config, loaded, lambda done: update(done, num_requests()))


def _lines(checks: Iterable[Check]) -> Iterable[list[str]]:
    for check in checks:
        yield ["ok" if check.ok else "FAIL", check.what, check.text]


def _print_speed(speed: Speed) -> None:
    plain = 1.0 / speed.plain_s
    say(f"One request, greedy, medians of real steps: {1e3 * speed.plain_s:.1f} ms a token, {plain:.1f} tokens/s.")
    if speed.k:
        say(
            f"A pass that verifies {speed.k} drafts takes {1e3 * speed.verify_s:.1f} ms, drafting "
            f"{1e3 * speed.draft_s:.1f} ms: it pays from {speed.break_even:.2f} tokens kept per pass on, "
            f"of at most {speed.k + 1}.\n"
        )


def _print_trial(trial: Trial) -> None:
    columns = ["prompts", "kept per pass", "% kept at 1, 2, ...", "ms a token, plain", "with drafts", "speed-up"]
    table("twenty prompts, greedy", columns, [_line(part) for part in (*trial.kinds, trial.all)])
    say(trial.verdict())


def _line(part: Expected) -> list[str]:
    kept = " ".join(f"{100 * share:.0f}" for share in part.kept_per_position)
    return [
        part.kind,
        f"{part.kept_per_pass:.2f}",
        kept or "-",
        f"{part.plain_ms:.1f}",
        f"{part.ms:.1f}",
        f"{part.speedup:.2f}x",
    ]
