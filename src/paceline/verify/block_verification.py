"""Block verification: Sun et al., arXiv 2403.10444, algorithm 2.

On average it keeps at least as many drafts as rejection sampling token by token. With p_i the target's and q_i the
draft's distribution after the first i of k drafts, x_1 to x_k:

    c_0 = 1,  c_i = min(c_{i-1} * p_{i-1}(x_i) / q_{i-1}(x_i), 1)    probability with which the prefix may stay
    r_i = max(c_i * p_i - q_i, 0),  z_i = sum of r_i                   residual weights behind it
    h_i = z_i / (z_i + 1 - c_i) for i < k,  h_k = c_k                  chance that coin i keeps the prefix

The longest prefix whose coin keeps it is kept. The next token is drawn from r_i, normalised, or from p_k if all
drafts are kept.

What is kept depends on drafts and coins behind it, too. The next step comes to their positions again, so its coins
and drafts need fresh noise: `noise.key` with the draft's depth in its step.

Where the target has no finite p_i, the drafts end: k is i, and the prefix is kept with probability c_i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.nouns import BROKEN
from paceline.core.sampling import BrokenRow
from paceline.verify.coupled import coupled_row
from paceline.verify.row_scores import RowScores, draft_probs, excess, judge_rows, keep_chance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.core.nouns import Draft, RowDraft, Scores, Verdict


class BlockVerification:
    """Promises the target's distribution, not the same text. Equal to `Coupled` at temperature 0."""

    name = "block"
    admits_any_trim = False
    walks_trees = False
    needs_probs = True

    def judge(self, draft: Draft, scores: Scores) -> Verdict:
        """Keep each row's longest prefix of drafts that a coin keeps."""
        return judge_rows(_verify_row, draft, scores)


def prefixes(drafted: RowDraft, row: RowScores) -> Iterator[tuple[float, NDArray[float64] | None]]:
    """Yield h_i and the next token's weights r_i [vocab] for each prefix, empty first.

    h_0 is 1. For the whole draft the weights are p_k. Where the target has no number they are None and last.
    """
    wanted, count = 1.0, len(drafted)
    for index in range(count + 1):
        try:
            p = row.probs(index)
        except BrokenRow:
            yield wanted, None
            return
        if index == count:
            yield wanted, p
            return
        q = draft_probs(drafted, index, len(p))
        rest = excess(wanted * p, q)
        mass = float(rest.sum())
        yield (1.0 if wanted == 1.0 else mass / (mass + 1.0 - wanted)), rest
        wanted = keep_chance(p, q, drafted.token_ids[index], wanted)


def _verify_row(drafted: RowDraft, row: RowScores) -> list[int]:
    if row.choose(0).params.greedy:
        return coupled_row(drafted, row)
    kept, weights = 0, None
    for length, (chance, rest) in enumerate(prefixes(drafted, row)):
        if length == 0 or row.coin(length - 1, depth=length - 1) < chance:
            kept, weights = length, rest
    if weights is None:
        return [*drafted.token_ids[:kept], BROKEN]
    last = row.choice(kept) if kept == len(drafted) else row.draw(kept, weights)
    return [*drafted.token_ids[:kept], last]
