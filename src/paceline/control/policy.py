"""The seam of control: what a policy sees before a step, what it answers, what it learns afterwards. Arrays only.

The same policies run in the engine and in the simulator.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.control.cost import Work
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Stop

NONE = -1  # in place of a drafter: the row decodes plainly


@noun
class StepView:
    """What is known of a step before drafting.

    An offer is what a drafter that costs nothing would propose: how sure it is of each token, [n, depth], NaN
    behind the end of a row's proposal.
    """

    rows: NDArray[int64]  # [n] that decode
    lengths: NDArray[int64]  # [n] tokens of each
    most: NDArray[int64]  # [n] drafts that each may have
    prefill: Work  # of the chunks that ride along
    offers: Mapping[int, NDArray[float64]] = field(default_factory=dict)  # by drafter, see `Controller.looks`
    wishes: Mapping[int, int] = field(default_factory=dict)  # row -> the drafter that its request named
    waiting: int = 0  # requests that have no row yet
    targets: Mapping[int, float] = field(default_factory=dict)  # row -> seconds per token its request asked for
    out: frozenset[int] = frozenset()  # drafters that fail, and are left in peace for some steps

    @property
    def num_rows(self) -> int:
        """Rows that decode."""
        return len(self.rows)

    @property
    def work(self) -> Work:
        """A pass of these rows without drafts, and without prefill."""
        keys = int(self.lengths.sum())
        return Work(self.num_rows, 0, keys, keys)


@noun
class Decision:
    """How far each row drafts, and with what."""

    ks: NDArray[int64]  # [n]
    drafters: NDArray[int64]  # [n] index of a drafter, or NONE
    seconds: float = 0.0  # the step is expected to take, 0 if nothing was predicted
    tokens: float = 0.0  # it is expected to commit
    speedup: float = 1.0  # expected against a step without drafts
    prefill_tokens: int | None = None  # at most so many ride along; None: as many as fit
    given_up: tuple[int, ...] = ()  # drafters that are not asked again, from now on
    stops: Mapping[int, Stop] = field(default_factory=dict)  # row -> where its drafting ends before its k


@noun
class Outcomes:
    """What became of a step's drafts."""

    rows: NDArray[int64]  # [n]
    drafters: NDArray[int64]  # [n]
    num_verified: NDArray[int64]  # [n]
    num_accepted: NDArray[int64]  # [n]
    draft_s: float
    target_s: float
    host_s: float = 0.0
    confidence: NDArray[float64] | None = None  # [n, depth] of all proposed, NaN where the drafter said nothing
    wait_s: float = 0.0  # of the rows, while other rows had their step
    num_drafted: NDArray[int64] | None = None  # [n] proposed; None: as many as were planned


@noun
class Drafted:
    """What drafters proposed, before any of it is verified."""

    rows: NDArray[int64]  # [n] that decode, in the order of the batch
    drafters: NDArray[int64]  # [n]
    ks: NDArray[int64]  # [n] tokens proposed
    confidence: NDArray[float64]  # [n, depth], NaN where the drafter said nothing


class Policy(Protocol):
    """Decides how far to draft."""

    @property
    def looks(self) -> bool:
        """Whether its next decision wants to know what drafters that cost nothing would propose."""
        ...

    def twin(self) -> Policy:
        """Return the same for another group of rows: it shares what is learnt, its choices are its own."""
        ...

    def admit(self, row: int) -> None:
        """A request begins in a row."""
        ...

    def rest(self, rows: int) -> bool:
        """Take a step of so many rows without a decision if the last one, to draft nothing, holds; say whether."""
        ...

    def hold(self, view: StepView) -> Decision | None:
        """Take a step with the last decision if that holds, whatever was learnt since; None if it does not."""
        ...

    def choose(self, view: StepView) -> Decision:
        """Decide for every row of a step anew, by what was learnt."""
        ...

    def decide(self, view: StepView) -> Decision:
        """Decide for every row of a step, anew if the last decision does not hold."""
        ...

    @property
    def trims(self) -> bool:
        """Whether some of what is drafted now may not be worth verifying."""
        ...

    def trim(self, view: StepView, drafted: Drafted) -> NDArray[int64]:
        """Return how much of each row's draft is verified. Changes nothing in the policy. [n]"""
        ...

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        """Take in what a step brought."""
        ...


def plain(view: StepView) -> Decision:
    """Return the decision to draft nothing."""
    return Decision(np.zeros(view.num_rows, np.int64), np.full(view.num_rows, NONE))


def alike(view: StepView, drafter: int, k: int) -> Decision:
    """Return the same for every row, as far as each may go."""
    ks = np.minimum(view.most, k)
    return Decision(ks, np.where(ks > 0, drafter, NONE))
