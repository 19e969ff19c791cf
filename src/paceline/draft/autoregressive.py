"""Autoregressive drafting: catching up on known tokens, and drawing tokens into chains.

Tokens are drawn with the noise of the target's own choice: draft and target then agree with probability at least
(1 - TV) / (1 + TV) (Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

import math
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from paceline.backend.sampling import draw, pointed
from paceline.backend.seam import StepLimit
from paceline.core.nouns import UNCHOSEN, RowDraft
from paceline.core.tree import Branches

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline import kernels
    from paceline.backend.seam import PassResult, RowView, Span
    from paceline.core.nouns import Plan, SamplingSpec, Stop
    from paceline.draft.hints import Hints
    from paceline.draft.model.text_window import TextWindow
    from paceline.model.config import ModelConfig

    DraftedRows = RowView | TextWindow  # whole texts, or the ends of texts
    # Runs a pass over spans and chooses the token after each of them.
    RunSpans = Callable[[Sequence[Span], Sequence[SamplingSpec]], PassResult]
    # Runs several steps for each span in one call, see `PassRequest.steps`.
    RunSteps = Callable[[Sequence[Span], Sequence[SamplingSpec], Sequence[StepLimit]], PassResult]


CATCH_UP_TOKENS = 512  # known tokens read per step for rows that fell behind, by a drafter as large as its target


class Chain:
    """A row's guesses so far."""

    def __init__(
        self,
        row: int,
        depth: int,
        pointer: kernels.TokenHints | None = None,
        stop: Stop | None = None,
        branches: int = 0,
    ) -> None:
        """depth: most guesses. pointer: gives hints to the guesses. stop: ends the chain earlier.

        branches: most second choices to hand out beside the guesses.
        """
        self.row, self.depth, self.pointer, self.stop, self.branches = row, depth, pointer, stop, branches
        self.token_ids: list[int] = []
        self.probs: list[NDArray[floating]] = []  # [vocab] each, if the law needs them
        self.margins: list[float] = []  # logits by which each was ahead of the next best token, NaN if not known
        self.second_ids: list[int] = []  # these next best tokens, as far as they were asked for and are known

    @property
    def broken(self) -> bool:
        """True if no logit of the newest guess was a finite number."""
        return bool(self.token_ids) and self.token_ids[-1] < 0

    @property
    def goes_on(self) -> bool:
        """True if another guess follows."""
        stops = self.stop is not None and bool(self.margins) and self.stop.over(self.margins)
        return len(self.token_ids) < self.depth and not self.broken and not stops

    def draft(self, drafter: str) -> RowDraft:
        """Return the guesses as a draft."""
        probs = np.stack(self.probs) if self.probs else None
        confidence = confidence_of(self.margins)
        branches = None
        if self.branches and confidence is not None and len(self.second_ids) == len(confidence):
            branches = self._second_choices(confidence)
        return RowDraft(self.token_ids, drafter, confidence, probs, branches)

    def _second_choices(self, confidence: Sequence[float]) -> Branches | None:
        """Return second choices as branches of one token, those likeliest to be kept first.

        The second choice at a depth is kept if all guesses before it are, and its rival is not.
        """
        alive, chances = 1.0, list[tuple[float, int]]()
        for depth, chance in enumerate(confidence):
            if 0 <= self.second_ids[depth] != self.token_ids[depth]:
                chances.append((-alive * (1 - chance), depth))
            alive *= chance
        depths = [depth for _, depth in sorted(chances)[: self.branches]]
        if not depths:
            return None
        return Branches(tuple(self.second_ids[d] for d in depths), tuple(d - 1 for d in depths))


def confidence_of(margins: Sequence[float]) -> list[float] | None:
    """Return each token's chance to be kept, by logit margin; None if any is unknown.

    It is so if target and drafter differ by logistic noise; the controller learns how they really differ.
    """
    if not margins or any(math.isnan(m) for m in margins):
        return None
    return [1 / (1 + math.exp(-m)) for m in margins]


def catch_up_tokens(own: ModelConfig, num_layers: int, target: ModelConfig) -> int:
    """Return the known tokens a drafter may read per step: more if it is small."""
    share = num_layers * own.hidden_size**2 / (target.num_layers * target.hidden_size**2)
    return max(CATCH_UP_TOKENS, int(CATCH_UP_TOKENS / share))


def share_out(behind: Mapping[int, int], allowance: int) -> tuple[list[int], dict[int, int]]:
    """Return the rows that can catch up in a step, and tokens for the others.

    behind: row -> number of tokens it has not seen. Rows that lack the fewest come first.
    """
    ready: list[int] = []
    nearer: dict[int, int] = {}
    for row in sorted(behind, key=behind.__getitem__):
        if behind[row] <= allowance:
            ready.append(row)
        elif allowance > 0:
            nearer[row] = allowance
        allowance -= min(behind[row], allowance)
    return ready, nearer


def num_same(guesses: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return how many of the first guesses are the text's tokens."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(guesses, token_ids, strict=False)))


def in_pieces(counts: Mapping[int, int], size: int) -> Iterator[dict[int, int]]:
    """Cut `counts[row]` tokens of each row, in order, into pieces of at most `size` tokens."""
    piece: dict[int, int] = {}
    room = size
    for row, left in counts.items():
        done = 0
        while done < left:
            piece[row] = min(left - done, room)
            done, room = done + piece[row], room - piece[row]
            if not room:
                yield piece
                piece, room = {}, size
    if piece:
        yield piece


def extend(
    rows: DraftedRows, chains: Sequence[Chain], run: Callable[[Sequence[SamplingSpec]], PassResult], *, dense: bool
) -> None:
    """Draw one more token per chain. `dense` also keeps the distributions they came from."""
    specs = [pointed(rows.spec_after(c.row, c.token_ids), c.pointer, c.token_ids) for c in chains]
    drawn = draw(run, specs, [len(chain.token_ids) for chain in chains], dense=dense)
    for index, chain in enumerate(chains):
        chain.token_ids.append(drawn.token_ids[index])
        if drawn.probs is not None:
            chain.probs.append(drawn.probs[index])
        if drawn.margins is not None:
            chain.margins.append(drawn.margins[index])
        if drawn.second_ids is not None:
            chain.second_ids.append(drawn.second_ids[index])


def begin(
    starts: Collection[int], depth: Mapping[int, int], plan: Plan, hints: Hints, branches: int = 0
) -> dict[int, Chain]:
    """Begin a chain of `depth[row]` guesses for each row, with stop, hints and branches."""
    pointers = hints.pointers(starts)
    return {
        row: Chain(row, depth[row], pointers.get(row), plan.stop(row), min(plan.branches(row), branches))
        for row in starts
    }


def draft_steps(
    rows: DraftedRows,
    chains: Mapping[int, Chain],
    starts: Mapping[int, int],
    run: RunSpans,
    run_all: RunSteps | None = None,
    *,
    dense: bool,
) -> None:
    """Draft token by token.

    The first step reads each row's known tokens from `starts[row]` on, each later step one guess. `run_all` runs
    all steps in one call, for rows whose specs do not depend on which tokens the guesses are.
    """
    spans: list[Span] = [(row, start, rows.known_len(row) - start, ()) for row, start in starts.items()]
    if run_all and not dense:
        easy = [span for span in spans if not rows.penalised(span[0])]
        spans = [span for span in spans if rows.penalised(span[0])]
        if easy:
            _draft_all(rows, [chains[row] for row, *_ in easy], partial(run_all, easy))
    while spans:
        wanting = [chains[row] for row, *_ in spans]
        extend(rows, wanting, partial(run, spans), dense=dense)
        spans = [_guess(rows, chain) for chain in wanting if chain.goes_on]


def _draft_all(
    rows: DraftedRows,
    chains: Sequence[Chain],
    run: Callable[[Sequence[SamplingSpec], Sequence[StepLimit]], PassResult],
) -> None:
    """Fill chains in one call."""
    # Without penalties a spec depends on how many guesses come before it, not on which.
    specs = [spec for chain in chains for spec in rows.row_specs(chain.row, [0] * (chain.depth - 1), margin=True)]
    result = run(specs, [StepLimit(chain.depth, chain.stop, chain.pointer) for chain in chains])
    assert result.margins is not None
    token_ids, margins = result.token_ids.tolist(), result.margins.tolist()
    done = 0
    for chain in chains:
        end = done + chain.depth
        count = token_ids[done:end].index(UNCHOSEN) if UNCHOSEN in token_ids[done:end] else chain.depth
        chain.token_ids, chain.margins = token_ids[done : done + count], margins[done : done + count]
        if result.second_ids is not None:
            chain.second_ids = result.second_ids[done : done + count].tolist()
        done = end


def _guess(rows: DraftedRows, chain: Chain) -> Span:
    """Return the span of a row's newest guess, which comes after the guesses before it."""
    start = rows.known_len(chain.row) + len(chain.token_ids) - 1
    return chain.row, start, 0, chain.token_ids[-1:]
