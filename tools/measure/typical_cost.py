"""Cost and gain of the law `typical`: `python -m tools.measure.typical_cost --prompts FILE.jsonl`.

One engine answers each prompt under `coupled` and under `typical` with each budget, in turns, one request at a
time, another law first at each prompt. Further lossless laws (`--laws rejection block`) get engines of their own.
The table has, of each:

- changed: share of the tokens that are not the target's own choice behind the same text, and how many answers
  exceeded their budget, which must be 0;
- kept: tokens a pass, the target's included; TPOT; speed: TPOT of `coupled` on the same prompt by this one, median
  with its interval;
- KL: drift in nats per position, over all positions of all answers. At temperature 0 nothing is random: at each
  position `typical` writes one token, e, and a law without changes would write the target's choice, x. With p the
  target's distribution at temperature 1 behind the same text, KL is KL(e || p) - KL(x || p) = ln p(x) - ln p(e),
  which is 0 where e is x. At other temperatures the figure is ln max p - ln p(e), summed over the changed tokens,
  with p after temperature and filters; that is an upper bound of the same difference.

The share of changed tokens is also an upper bound of the mean total variation between both distributions, by the
coupling inequality.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.bench.prompt_file import read_prompts
from paceline.bench.statistics import median_interval
from paceline.core.errors import ConfigError
from paceline.core.params import MAX_CHANGE_BUDGET, SamplingParams, Speculation
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.serve.llm import LLM
from paceline.serve.terminal.output_files import check_file
from paceline.verify.typical import most_changed
from tools.entry import add_prompts, exit_status

if TYPE_CHECKING:
    from argparse import Namespace

    from paceline.bench.prompt_file import Prompt
    from paceline.core.figures import Figures

BUDGETS = (0.01, 0.02, 0.05)
OTHER_LAWS = ("rejection", "block")
COUPLED = "coupled"


@dataclass
class LawArm:
    """One law: how it is asked for, and its answers."""

    name: str
    llm: LLM
    speculation: Speculation | None = None
    figures: list[Figures] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)  # of each answer; NaN: too short

    def ask(self, prompt: Prompt, params: SamplingParams) -> None:
        """Ask a prompt, alone in the engine."""
        messages = [{"role": "user", "content": prompt.text}]
        first_s, num_tokens, end_s = 0.0, 0, 0.0
        for delta in self.llm.stream(messages, params, self.speculation):
            end_s = perf_counter()
            if not num_tokens:
                first_s, first_tokens = end_s, len(delta.token_ids)
            num_tokens += len(delta.token_ids)
            if delta.figures is not None:
                self.figures.append(delta.figures)
        later = num_tokens - first_tokens
        self.tpot_s.append((end_s - first_s) / later if later else float("nan"))


def facts(arm: LawArm, plain: LawArm) -> dict[str, Any]:
    """Return the figures of a law."""
    figures = arm.figures
    num_tokens = sum(f.completion_tokens for f in figures)
    pairs = [(a, b) for a, b in zip(plain.tpot_s, arm.tpot_s, strict=True) if a == a and b == b]  # noqa: PLR0124
    return {
        "law": arm.name,
        "answers": len(figures),
        "tokens": num_tokens,
        "changed_tokens": sum(f.changed_tokens for f in figures),
        "changed_share": sum(f.changed_tokens for f in figures) / num_tokens,
        "over_budget": sum(
            f.changed_tokens > most_changed(f.change_budget or 0.0, f.completion_tokens) for f in figures
        ),
        "tokens_per_pass": sum(f.decoded_tokens for f in figures) / max(1, sum(f.decode_passes for f in figures)),
        "tpot_ms": 1e3 * fmean(b for _, b in pairs),
        "tpot_ms_p50": 1e3 * median(b for _, b in pairs),
        "speed": median_interval([a / b for a, b in pairs]),
        "kl_nats_per_position": sum(f.changed_nats for f in figures) / num_tokens,
    }


def measure(args: Namespace, console: Console) -> list[dict[str, Any]]:
    """Ask every prompt under every law; return their figures."""
    # Every answer computes its prompt: behind cached pages a head catches up in the decode passes.
    config = replace(engine_config(args), law=COUPLED, law_budget=None, prefix_cache=False)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed)
    llm = LLM.of(config)
    arms = [LawArm(COUPLED, llm)]
    arms += [LawArm(f"typical {b:g}", llm, Speculation(law="typical", budget=b)) for b in args.budgets]
    arms += [LawArm(law, LLM.of(replace(config, law=law))) for law in args.laws]
    prompts = read_prompts(args.prompts, args.limit)
    for arm in arms:
        arm.ask(prompts[0], replace(params, max_tokens=8))  # the first call touches weights
        arm.figures.clear()
        arm.tpot_s.clear()
    for index, prompt in enumerate(track(prompts, "asking", console=console)):
        turn = index % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            arm.ask(prompt, params)
    for each in {id(arm.llm): arm.llm for arm in arms}.values():
        each.close()
    return [facts(arm, arms[0]) for arm in arms]


def show(found: list[dict[str, Any]], console: Console) -> None:
    """Print the table."""
    table = Table(
        "law", "tokens", "changed", "over budget", "kept a pass", "TPOT ms", "speed", "KL nats a position"
    )
    for one in found:
        speed = one["speed"]
        interval = "" if speed["low"] is None else f" ({speed['low']:.3f} to {speed['high']:.3f})"
        table.add_row(
            one["law"],
            str(one["tokens"]),
            f"{one['changed_share']:.2%}",
            str(one["over_budget"]),
            f"{one['tokens_per_pass']:.3f}",
            f"{one['tpot_ms']:.2f}",
            f"{speed['median']:.3f}{interval}",
            f"{one['kl_nats_per_position']:.5f}",
        )
    console.print(table)


def parse(arguments: list[str]) -> Namespace:
    """Parse the command line. Raises `ConfigError`."""
    parser = ArgumentParser(prog="typical_cost", description=__doc__.partition("\n")[0])
    add_engine_arguments(parser)
    add_prompts(parser)
    parser.add_argument("--limit", type=int, metavar="N", help="evenly spaced prompts of the file (default: all)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, metavar="SHARE")
    parser.add_argument("--laws", nargs="*", default=(), choices=OTHER_LAWS, help="lossless laws to ask beside")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args(arguments)
    if not all(0 <= budget <= MAX_CHANGE_BUDGET for budget in args.budgets):
        raise ConfigError(f"--budgets are shares from 0 to {MAX_CHANGE_BUDGET}")
    if args.limit is not None and args.limit < 1:
        raise ConfigError("--limit is at least 1")
    return args


def main() -> int:
    """Measure, print the table, and write it if asked."""
    args, console = parse(sys.argv[1:]), Console(width=120)
    check_file("--json", args.json)
    found = measure(args, console)
    show(found, console)
    if args.json:
        settings = {"temperature": args.temperature, "max_tokens": args.max_tokens, "draft": args.draft}
        Path(args.json).write_text(json.dumps({"settings": settings, "laws": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
