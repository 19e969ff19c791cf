"""Tell what trees of drafts can gain here: `python -m tools.measure.tree_gain [--prompts FILE.jsonl]`.

Chains of a head are verified. The head's second choice at each depth, the draft's rival, is noted beside them. So
it is known for each step what a shorter chain would have kept. It is also known what second choices as branches of
one token would have added: one token where the target refuses a draft and chooses its rival. Prices are measured:
drafting to a depth, and a pass of n tokens. A table has, for each number of verified tokens, the best chain and
the best chain with branches: tokens and milliseconds of a step, and time per token. Branches are those that the
drafter thinks likeliest. Two bounds follow. `one right branch`: an oracle adds in each step the one branch that is
kept, for the price of one token. `free`: verified tokens cost nothing, and every chain has all its branches.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.backend.branches import without_branches
from paceline.bench.interleave import make_questions
from paceline.bench.prompt_file import read_prompts, spread
from paceline.control.cost import MeasuredCost
from paceline.control.files import read_profile
from paceline.control.fixed import FixedK
from paceline.control.policy import Work
from paceline.core.params import SamplingParams
from paceline.engine.assembly.auto import measure
from paceline.engine.assembly.build import assemble, load
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from paceline.model.template import compiled
from paceline.serve.prompts import Prompts
from tools.entry import add_prompts, exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.control.protocols import StepTimes
    from paceline.core.nouns import Batch, Draft, RowDraft, RowVerdict, Verdict
    from paceline.engine.engine import Engine

DRAFTER, CONTEXT = "eagle3", 256  # tokens of context at which passes are priced
SHAPES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # verified drafts


@dataclass(frozen=True, slots=True)
class Kept:
    """Outcome of one step of one row."""

    on_chain: int  # drafts of the chain that were kept
    drafted: int
    rank: int  # place of the rival that the target chose, among the branches; -1: it chose another token
    parents: tuple[int, ...]  # depth of each branch's parent, the likeliest branch first

    def tokens(self, num_chain: int, num_branches: int) -> int:
        """Return the tokens that a shorter chain with so many branches would have brought."""
        if self.on_chain >= num_chain:
            return num_chain + 1
        beside = [parent for parent in self.parents if parent + 1 < num_chain][:num_branches]
        saved = self.rank >= 0 and self.parents[self.rank] in beside
        return self.on_chain + 1 + int(saved)


@dataclass(frozen=True, slots=True)
class WatchedTrees(FixedK):
    """Verifies chains alone, and records which second choices were right."""

    kept: list[Kept] = field(default_factory=list)

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Drop the branches, so that chains are verified alone."""
        return without_branches(draft.rows)

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> tuple[()]:
        """Record the step."""
        for r, p, v in zip(batch.rows, proposed.rows, verdict.rows, strict=True):
            if r.decodes and len(p) == self.k and p.branches is not None:
                self.kept.append(_kept(p, v))
        return ()


def _kept(proposed: RowDraft, verdict: RowVerdict) -> Kept:
    branches, on_chain = proposed.branches, verdict.num_accepted
    assert branches is not None
    chosen = verdict.token_ids[on_chain]
    hits = [i for i, parent in enumerate(branches.parents) if parent + 1 == on_chain]
    rank = next((i for i in hits if branches.token_ids[i] == chosen), -1)
    return Kept(on_chain, len(proposed), rank, branches.parents)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the tables."""
    parser = ArgumentParser(prog="python -m tools.measure.tree_gain", description=(__doc__ or "").split("\n")[0])
    add_prompts(parser)
    parser.add_argument("--model", default="default")
    parser.add_argument("--limit", type=int, default=48, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="M")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--k", type=int, default=8, metavar="K", help="depth of the chains")
    parser.add_argument(
        "--profile", metavar="FILE", help="prices of a `paceline profile`; they are measured otherwise"
    )
    parser.add_argument("--threads", type=int, default=None, metavar="N")
    args = parser.parse_args(argv)
    config = EngineConfig(
        model=args.model,
        draft=f"{DRAFTER}:k={args.k},branches={args.k}",
        threads=args.threads,
        kv_tokens=1 << 14,
        limits=Limits(num_rows=1, max_len=2048),
    )
    loaded = load(config)
    engine = assemble(config, loaded).engine
    cost = _prices(args.profile) if args.profile else measure(engine, config, args.model).cost
    assert isinstance(cost, MeasuredCost)
    encode = Prompts(loaded.tokenizer, compiled(loaded.template), loaded.decoder.config.max_context)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    questions = make_questions(spread(read_prompts(args.prompts), args.limit), encode, params, 0)
    watched = WatchedTrees(DRAFTER, args.k, args.k)
    _answer(engine, watched, [q.request for q in questions])
    _show(watched.kept, args.k, cost)
    return 0


def _prices(path: str) -> MeasuredCost:
    """Return the prices of a profile, of one drafter."""
    profile = read_profile(Path(path))
    assert isinstance(profile.cost, MeasuredCost)
    return MeasuredCost(profile.cost.target, (profile.cost.drafters[profile.drafters.index(DRAFTER)],))


def _answer(engine: Engine, watched: WatchedTrees, requests: Sequence[object]) -> None:
    engine.controller = watched
    for request in requests:
        engine.add(request)  # type: ignore[arg-type]
    while engine.has_work:
        engine.step()


def _show(kept: Sequence[Kept], k: int, cost: MeasuredCost) -> None:
    shown = Console(width=120)
    refused = [one for one in kept if one.on_chain < k]
    by_depth = Table("depth", "refused there", "of these, second choice right", title="where chains end")
    for depth in range(k):
        here = [one for one in refused if one.on_chain == depth]
        saved = np.mean([one.rank >= 0 for one in here]) if here else 0.0
        by_depth.add_row(str(depth + 1), f"{len(here) / len(kept):.3f}", f"{saved:.3f}")
    shown.print(f"{len(kept)} steps; mean tokens of a chain of {k}: {_mean(kept, k, 0):.3f}", by_depth)
    found = Table("verified", "best chain", "tokens", "step ms", "ms/token", "with branches", "tokens", "step ms",
                  "ms/token", "gain", title="chains and trees of the same number of tokens")  # fmt: skip
    for n in SHAPES:
        chains = [(m, 0) for m in range(1, min(n, k) + 1)]
        trees = [(m, n - m) for m in range(1, min(n, k) + 1) if 0 < n - m <= m]
        chain, tree = (_best(kept, shapes, cost) for shapes in (chains, trees))
        if tree is None or chain is None:
            continue
        found.add_row(str(n), *chain[1], *tree[1], f"{chain[0] / tree[0]:.3f}")
    shown.print(found)
    every = [(m, b) for m in range(1, k + 1) for b in range(m + 1)]
    of_all = _best(kept, every, cost)
    of_chains = _best(kept, [(m, b) for m, b in every if not b], cost)
    assert of_all is not None
    assert of_chains is not None
    shown.print(
        f"best chain {of_chains[1]}, best of all {of_all[1]}: "
        f"{of_chains[0] / of_all[0]:.3f} x the best chain's time a token"
    )
    shown.print(
        f"bounds: one right branch {_oracle(kept, k, cost):.3f} x, "
        f"free {_mean(kept, k, k) / _mean(kept, k, 0):.3f} x"
    )
    prices = (f"{n}: {_pass_s(cost, n, 0) / _pass_s(cost, 0, 0):.3f}" for n in (1, 2, 4, 6, 8, 15))
    shown.print("price of a pass with so many drafts, of one without: " + ", ".join(prices))


def _mean(kept: Sequence[Kept], num_chain: int, num_branches: int) -> float:
    return float(np.mean([one.tokens(num_chain, num_branches) for one in kept]))


def _pass_s(cost: MeasuredCost, num_chain: int, num_branches: int) -> float:
    n = 1 + num_chain + num_branches
    pairs = (n + num_branches) * CONTEXT  # a branch reads the context anew
    return float(cost.target(Work(n, 0, CONTEXT, pairs)))


def _step_s(cost: MeasuredCost, num_chain: int, num_branches: int) -> float:
    drafting = cost.drafters[0]
    return _pass_s(cost, num_chain, num_branches) + float(drafting.seconds[1, min(num_chain, drafting.max_depth)])


def _best(
    kept: Sequence[Kept], shapes: Sequence[tuple[int, int]], cost: MeasuredCost
) -> tuple[float, tuple[str, ...]] | None:
    """Return the least seconds a token, and what the table says of it."""
    found: list[tuple[float, tuple[str, ...]]] = []
    for m, b in shapes:
        tokens, seconds = _mean(kept, m, b), _step_s(cost, m, b)
        told = (f"{m}+{b}", f"{tokens:.3f}", f"{1e3 * seconds:.2f}", f"{1e3 * seconds / tokens:.3f}")
        found.append((seconds / tokens, told))
    return min(found, default=None)


def _oracle(kept: Sequence[Kept], k: int, cost: MeasuredCost) -> float:
    """Return the gain of one branch a step that is always the right one."""
    chain = min(_step_s(cost, m, 0) / _mean(kept, m, 0) for m in range(1, k + 1))
    return chain / min(_step_s(cost, m, 1) / _mean(kept, m, k) for m in range(1, k + 1))


if __name__ == "__main__":
    sys.exit(exit_status(main))
