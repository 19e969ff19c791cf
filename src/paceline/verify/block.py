"""Block verification (Sun et al., arXiv 2403.10444, algorithm 2).

On average it keeps at least as many drafts as token-wise rejection sampling. Let x_1 to x_k be the drafts, p_i and
q_i the distributions of target and drafter after the first i of them:

    c_0 = 1,  c_i = min(c_{i-1} * p_{i-1}(x_i) / q_{i-1}(x_i), 1)    weight that the target leaves to prefix i
    r_i = max(c_i * p_i - q_i, 0),  z_i = sum of r_i                   weight of the target beyond the drafter's
    h_i = z_i / (z_i + 1 - c_i) for i < k,  h_k = c_k                  probability that coin i keeps prefix i

The longest prefix whose coin keeps it is emitted. The next token is drawn from r_i, normalised, or from p_k if all
drafts are kept.

This law uses the drafts and coins of every position, also those after the kept prefix. The next step judges those
positions again, so its coins and drafts need fresh noise: `noise.key` takes the draft's depth in its step.

If the target has no p_i (a logit is not a number), the drafts end there: k becomes i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.nouns import BROKEN
from paceline.core.sampling import BrokenRow
from paceline.verify.coupled import coupled_row
from paceline.verify.rows import RowScores, draft_probs, excess, judge_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy import float64, floating
    from numpy.typing import NDArray

    from paceline.core.nouns import Draft, RowDraft, Scores, Verdict


class Block:
    """Block verification. Keeps the target's distribution, not the text; equals `Coupled` at temperature 0."""

    name = "block"
    admits_any_trim = False
    needs_probs = True

    def judge(self, draft: Draft, scores: Scores) -> Verdict:
        """Keep the longest prefix of each row's drafts whose coin keeps it."""
        return judge_rows(_block_row, draft, scores)


def prefixes(drafted: RowDraft, row: RowScores) -> Iterator[tuple[float, NDArray[float64] | None]]:
    """Yield h_i and r_i [vocab] for each prefix of the drafts, the empty one first.

    h_0 is 1. The weights of the whole draft are p_k. They are None, and the last, where the target has no p_i.
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
        residual = excess(wanted * p, q)
        mass = float(residual.sum())
        yield (1.0 if wanted == 1.0 else mass / (mass + 1.0 - wanted)), residual
        wanted = _still_wanted(wanted, p, q, drafted.token_ids[index])


def _still_wanted(wanted: float, p: NDArray[float64], q: NDArray[floating], token_id: int) -> float:
    target, given = wanted * float(p[token_id]), float(q[token_id])
    return 0.0 if target == 0.0 else 1.0 if target >= given else target / given


def _block_row(drafted: RowDraft, row: RowScores) -> list[int]:
    if row.spec(0).params.greedy:
        return coupled_row(drafted, row)
    kept, weights = 0, None
    for length, (chance, residual) in enumerate(prefixes(drafted, row)):
        if length == 0 or row.coin(length - 1, depth=length - 1) < chance:
            kept, weights = length, residual
    if weights is None:
        return [*drafted.token_ids[:kept], BROKEN]
    last = row.choice(kept) if kept == len(drafted) else row.draw(kept, weights)
    return [*drafted.token_ids[:kept], last]
