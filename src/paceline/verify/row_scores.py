"""Scores of one row, and the loop over rows that every law shares."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.core import noise
from paceline.core.nouns import BROKEN, UNCHOSEN, RowVerdict, Verdict
from paceline.core.sampling import choose_token, distribution, draw, logprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import float64, floating
    from numpy.typing import NDArray

    from paceline.core.nouns import Draft, RowDraft, SamplingSpec, Scores
    from paceline.core.request_nouns import TokenLogprobs
    from paceline.core.tree import Branches

    Rule = Callable[[RowDraft, "RowScores"], Sequence[int]]
    Walk = Callable[[RowDraft, Branches, "RowScores"], tuple[list[int], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class RowScores:
    """Scored positions of a row: index 0 follows its newest token, index i draft i."""

    scores: Scores
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def choose(self, index: int) -> SamplingSpec:
        """Return the rule by which the target chooses at a position."""
        return self.scores.specs[self.start + index]

    def logits(self, index: int) -> NDArray[floating]:
        """Return the raw logits [vocab] of a position whose `choose` wants them."""
        logits, logit_idx = self.scores.logits, self.scores.logit_idx
        assert logits is not None
        assert logit_idx is not None
        return logits[logit_idx[self.start + index]]  # type: ignore[no-any-return]

    def choice(self, index: int) -> int:
        """Return the target's own token at a position, BROKEN if it has none."""
        chosen = int(self.scores.chosen[self.start + index])
        return choose_token(self.logits(index), self.choose(index)) if chosen == UNCHOSEN else chosen

    def probs(self, index: int) -> NDArray[float64]:
        """Return the target's distribution [vocab] after the request's transforms. Raises `BrokenRow`."""
        import numpy as np

        logits = self.logits(index)
        ids, probs = distribution(logits, self.choose(index))
        dense = np.zeros(len(logits))
        dense[ids] = probs
        return dense

    def coin(self, index: int, depth: int = 0) -> float:
        """Return the uniform number in [0, 1) that decides on the draft at a position."""
        return noise.uniform(self._key(index, noise.Lane.ACCEPT, depth))

    def draw(self, index: int, weights: NDArray[float64]) -> int:
        """Draw a position's token in place of the rejected draft. weights: [vocab], any sum.

        The sum is 0 only by rounding, where p equals q; p is used then.
        """
        return draw(weights if weights.any() else self.probs(index), self._key(index, noise.Lane.RESIDUAL))

    def _key(self, index: int, lane: noise.Lane, depth: int = 0) -> noise.Key:
        choose = self.choose(index)
        return noise.key(choose.seed, choose.choice, lane, choose.position, depth)


def draft_probs(drafted: RowDraft, index: int, vocab_size: int) -> NDArray[floating]:
    """Return a draft's distribution q [vocab], one-hot if its drafter did not draw."""
    import numpy as np

    if drafted.probs is not None:
        return drafted.probs[index]  # type: ignore[no-any-return]
    one_hot = np.zeros(vocab_size)
    one_hot[drafted.token_ids[index]] = 1.0
    return one_hot


def keep_chance(p: NDArray[float64], q: NDArray[floating], token_id: int, share: float = 1.0) -> float:
    """Return min(share * p / q, 1), a draft's chance to stay. p, q: [vocab]."""
    wanted, given = share * float(p[token_id]), float(q[token_id])
    return 0.0 if wanted == 0.0 else 1.0 if wanted >= given else wanted / given


def excess(p: NDArray[float64], q: NDArray[floating]) -> NDArray[float64]:
    """Return max(p - q, 0), the residual weights of a rejected draft. [vocab]"""
    import numpy as np

    return np.maximum(p - q, 0.0)


def judge_rows(rule: Rule, draft: Draft, scores: Scores, walk: Walk | None = None) -> Verdict:
    """Apply a rule to every row that was scored.

    The rule returns the kept drafts and one token more, which is BROKEN where the target has no finite number. The
    drafts before it stay: plain decoding would have written them too. walk: the rule for rows with branches.
    """
    judged = zip(draft.rows, rows_of(scores), strict=True)
    return Verdict(tuple(judge_row(rule, d, r, walk) for d, r in judged))


def rows_of(scores: Scores) -> list[RowScores]:
    """Return the scores of each row."""
    return [RowScores(scores, start, end) for start, end in pairwise(map(int, scores.cu_len))]


def judge_row(
    rule: Callable[[RowDraft, RowScores], Sequence[int]],
    drafted: RowDraft,
    row: RowScores,
    walk: Walk | None = None,
) -> RowVerdict:
    """Apply a rule to one row, see `judge_rows`."""
    if len(row) == 0:
        return RowVerdict()
    positions = len(drafted) + drafted.num_branch_tokens + 1
    assert len(row) == positions, "a scored row has a position for each draft and one more"
    if drafted.branches is None or walk is None:
        token_ids = rule(drafted, row)
        return RowVerdict(token_ids, len(token_ids) - 1, _row_logprobs(row, token_ids, range(len(token_ids))))
    token_ids, off_chain = walk(drafted, drafted.branches, row)
    num_on_chain = len(token_ids) - 1 - len(off_chain)
    places = [*range(num_on_chain + 1), *(len(drafted) + 1 + index for index in off_chain)]
    return RowVerdict(token_ids, len(token_ids) - 1, _row_logprobs(row, token_ids, places), off_chain=off_chain)


def _row_logprobs(row: RowScores, token_ids: Sequence[int], places: Sequence[int]) -> list[TokenLogprobs] | None:
    """Return the log-probabilities of tokens that were chosen at some positions of a row."""
    num_top = row.choose(0).params.logprobs
    if num_top is None:
        return None
    chosen = zip(places, token_ids, strict=True)
    return [logprobs(row.logits(i), token, num_top) for i, token in chosen if token != BROKEN]
