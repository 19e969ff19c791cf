"""Compare drafters by tokens kept and processor time: `python -m tools.measure.draft_choices --draft SPEC ...`.

Greedy, one request at a time; the drafters answer each question in turns, so that a slow minute slows all. Steps
with fewer than `k` drafts are left out. Times are medians of processor time, which other work on a machine
lengthens less than clock time. Tokens of a pass do not depend on the machine at all. `expected` is the time of a
step, drafting and pass, divided by its tokens; `gain` is `expected` of plain decoding divided by it.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from time import process_time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.bench.interleave import make_questions
from paceline.bench.prompt_file import read_prompts, spread
from paceline.control.fixed import FixedK
from paceline.core.params import SamplingParams
from paceline.engine.assembly.build import assemble, load
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from paceline.model.template import compiled
from paceline.serve.prompts import Prompts
from tools.entry import add_prompts, exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.control.protocols import StepTimes
    from paceline.core.nouns import Batch, Draft, Plan, Verdict
    from paceline.core.request_nouns import Request
    from paceline.draft.drafter import Drafter
    from paceline.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Watched(FixedK):
    """Records the tokens of each step that had all of its drafts."""

    tokens: list[int] = field(default_factory=list)

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> tuple[()]:
        """Record the step."""
        for r, p, v in zip(batch.rows, draft.rows, verdict.rows, strict=True):
            if r.decodes and len(p) == self.k:
                self.tokens.append(v.num_accepted + 1)
        return ()


@dataclass(slots=True, eq=False)
class Choice:
    """One drafter, its engine and what was measured."""

    spec: str
    engine: Engine
    watched: Watched
    draft_s: list[float] = field(default_factory=list)  # of each step that counts
    pass_s: list[float] = field(default_factory=list)  # of the same steps, without drafting
    _spent: float = 0.0

    def __post_init__(self) -> None:
        self.engine.controller = self.watched
        for drafter in self.engine.drafting.drafters.values():
            self._time(drafter)

    def _time(self, drafter: Drafter) -> None:
        propose = drafter.propose

        def timed(batch: Batch, plan: Plan) -> Draft:
            start = process_time()
            draft = propose(batch, plan)
            self._spent += process_time() - start
            return draft

        drafter.propose = timed  # type: ignore[method-assign]

    def answer(self, request: Request) -> None:
        """Answer one request."""
        self.engine.add(request)
        while self.engine.has_work:
            counted, self._spent, start = len(self.watched.tokens), 0.0, process_time()
            self.engine.step()
            if len(self.watched.tokens) > counted:
                self.draft_s.append(self._spent)
                self.pass_s.append(process_time() - start - self._spent)

    def expected_s(self) -> float:
        """Return the processor time of a token."""
        return (median(self.draft_s) + median(self.pass_s)) / fmean(self.watched.tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = ArgumentParser(
        prog="python -m tools.measure.draft_choices", description=(__doc__ or "").split("\n")[0]
    )
    add_prompts(parser)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", action="append", required=True, metavar="SPEC", help="with k; several times")
    parser.add_argument("--weights", default=None, help="of the target")
    parser.add_argument("--only", default="", metavar="WORDS", help="categories of prompts, with commas")
    parser.add_argument("--limit", type=int, default=24, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="M")
    args = parser.parse_args(argv)
    config = EngineConfig(
        model=args.model,
        weights=args.weights,
        threads=1,
        kv_tokens=1 << 13,
        limits=Limits(num_rows=1, max_len=2048),
        keep_learnt=False,
    )
    loaded = load(config)
    choices = [Choice("off", assemble(replace(config, draft="off"), loaded).engine, Watched())]
    for spec in args.draft:
        engine = assemble(replace(config, draft=spec), loaded).engine
        (drafter,) = engine.drafting.drafters.values()
        Console(width=150).print(spec, dict(drafter.report()))
        choices.append(Choice(spec, engine, Watched(drafter.name, int(drafter.report()["k"]))))
    encode = Prompts(loaded.tokenizer, compiled(loaded.template), loaded.decoder.config.max_context)
    wanted = args.only.split(",") if args.only else None
    prompts = [one for one in read_prompts(args.prompts) if wanted is None or one.category in wanted]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    questions = make_questions(spread(prompts, args.limit), encode, params, 0)
    with suppress(KeyboardInterrupt):  # then the table is of the questions so far
        for question in questions:
            for choice in choices:
                choice.answer(question.request)
    _show(choices)
    return 0


def _show(choices: Sequence[Choice]) -> None:
    shown = Table("drafter", "steps", "tokens a pass", "drafting ms", "pass ms", "expected ms/token", "gain")
    for one in choices:
        gain = choices[0].expected_s() / one.expected_s()
        times = [f"{1e3 * seconds:.1f}" for seconds in (median(one.draft_s), median(one.pass_s), one.expected_s())]
        tokens = f"{fmean(one.watched.tokens):.3f}"
        shown.add_row(one.spec, str(len(one.watched.tokens)), tokens, *times, f"{gain:.3f}")
    Console(width=150).print(shown)


if __name__ == "__main__":
    sys.exit(exit_status(main))
