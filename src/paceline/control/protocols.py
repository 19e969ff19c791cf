"""Interfaces of control: controllers, policies, prices, traces, and the plain values that they exchange.

The engine talks to a `Controller`, such as `ClosedLoop`, whose `Policy` asks a `StepCost` for prices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline import kernels
    from paceline.control.policy import Allocation, Decision, Drafted, Outcomes, StepView, Work
    from paceline.core.nouns import Batch, Draft, Plan, Verdict


NOTHING_READ: Mapping[str, int] = {}  # stores that hold nothing of a row's text

# A step of the engine ----------------------------------------------------------------------------


@noun
class StepTimes:
    """Seconds of a step by what they were spent on."""

    draft_s: float
    target_s: float
    host_s: float
    wait_s: float = 0.0  # time in which these rows waited for the other group's step
    touched: tuple[float, ...] = ()  # experts of the pass, as `PassResult.touched`

    @property
    def total_s(self) -> float:
        """Seconds spent on these rows."""
        return self.draft_s + self.target_s + self.host_s


@noun
class StepAccounting:
    """Predicted and measured time of a step, and an estimate for plain decoding."""

    measured_s: float
    predicted_s: float  # by the prices before the step, its prefill being known
    plain_s: float  # the same tokens in steps without drafts, on the same machine at the same time


class Controller(Protocol):
    """Decides how much to speculate, and learns from outcomes."""

    def wants_preview(self, num_rows: int, unavailable: frozenset[int]) -> bool:
        """Return whether to query lookup drafters before `plan`; arguments as in the view."""

    @property
    def second_group(self) -> Controller:
        """Controller of a second group of rows, with the same estimates and its own plans."""

    def admit(self, row: int, valid_lens: Mapping[str, int] = NOTHING_READ, *, rebirth: bool = False) -> None:
        """Note that a request begins in a row.

        valid_lens: leading tokens that each store holds of it. rebirth: it goes on after a preemption.
        """

    def forget_texts(self, drafter: str) -> None:
        """Note that a drafter has lost all that it had read."""

    def reuse_plan(self, num_rows: int) -> bool:
        """Begin a step without drafts or view if the last plan holds; return whether."""

    def plan(self, view: StepView) -> Plan:
        """Plan a step."""

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Return the part of a draft that is worth verifying."""

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> Sequence[StepAccounting]:
        """Learn from a step; return the accounting since the last call.

        proposed, draft: before and after trimming."""


class Keeper(Protocol):
    """Stores what controllers learnt, for later engines."""

    def now_and_then(self, controller: Controller) -> None:
        """Store what was learnt, if not done for a while; called with each request."""

    def keep(self, controller: Controller) -> None:
        """Store what was learnt."""


class TraceSink(Protocol):
    """Receives everything that a closed loop sees, chooses and gets."""

    def admitted(self, row: int, read: Mapping[int, int], *, rebirth: bool = False) -> None:
        """Note that a request began in a row. read: leading tokens that drafters know already."""

    def forgotten(self, drafter: int) -> None:
        """Note that a drafter has lost all that it had read."""

    def reused(self, num_rows: int, host_s: float, num_tokens: int) -> None:
        """Note a step that reused a plan without a view. num_rows: 0 with prefill."""

    def planned(self, view: StepView, decision: Decision, group: int) -> None:
        """Note the plan of a group's step."""

    def learnt(self, outcomes: Outcomes, prefill: Work, group: int, paid: Outcomes | None = None) -> None:
        """Note the outcome of a group's step, and the work of its prefill.

        paid: as for `ClosedLoop.learn`.
        """


# A choice ----------------------------------------------------------------------------------------


class Policy(Protocol):
    """Decides how far to draft."""

    def wants_preview(self, num_rows: int, unavailable: frozenset[int]) -> bool:
        """Return whether to query lookup drafters for the next view; arguments as in a view."""

    def for_second_group(self) -> Policy:
        """Return a policy for a second group: the same estimates, its own choices."""

    def admit(self, row: int) -> None:
        """Note that a request begins in a row."""

    def reuse_without_view(self, num_rows: int) -> bool:
        """Begin a step without drafts if the last decision holds; return whether it does."""

    def reuse(self, view: StepView) -> Decision | None:
        """Begin a step by the last decision, if it holds for a view; else None."""

    def choose(self, view: StepView) -> Decision:
        """Begin a step by a new decision, from what was learnt."""

    def decide(self, view: StepView) -> Decision:
        """Reuse the last decision, or choose anew."""

    @property
    def may_trim(self) -> bool:
        """True if some drafts of this step may not be worth verifying."""

    def trim(self, view: StepView, drafted: Drafted) -> NDArray[int64]:
        """Return how many of each row's drafts to verify. Changes nothing in the policy. [n]"""

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        """Learn from the outcome of a step."""


# Prices ------------------------------------------------------------------------------------------


@noun
class Candidates:
    """Drafts that a step may have, by row."""

    alive: NDArray[float64]  # [n, depth] chance that each is kept, times the weight of the row's tokens
    max_drafts: NDArray[int64]  # [n] most drafts of each row
    lengths: NDArray[int64]  # [n] tokens of each row
    drafters: NDArray[int64]  # [n] drafter of each row
    plain_tokens: float  # tokens that the step commits without drafts, weighted


@noun
class StepChoice:
    """Drafter and draft length of each row."""

    drafters: NDArray[int64]  # [n]
    allocation: Allocation
    prefill_s: float  # seconds of the step that are the prefill's, due in any case


class PlanContext(NamedTuple):
    """Step number of a group; tokens per second and rows of its last choice."""

    step: int
    tokens_per_s: float
    num_rows: int = 0  # 0: as many as now


class KnownDrafters(NamedTuple):
    """Knowledge of the drafters when a step is planned, by drafter."""

    estimates: list[kernels.Estimates | None]  # None: it cannot be asked
    prices_s: NDArray[float64]  # [num_drafters, max_k] seconds of 1, 2, ... drafts of each row
    tokens_per_s: float  # value of a second to one row, in tokens


class StepCost(Protocol):
    """Prices steps, and allocates drafts by these prices."""

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """Return the seconds of a step. base: without drafts. Others: by row, [n]."""

    def drafting_s(self, ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """Return the seconds of drafting alone. [n] each"""

    def reading_s(self, view: StepView, *, one_step: bool = False) -> NDArray[float64]:
        """Return the seconds of reading what each drafter lacks of each row's text. [num_drafters, n]

        one_step: only the part that the drafter reads in one step, if it reads for this row alone.
        """

    @property
    def answer_tokens(self) -> float:
        """Mean length of an answer, over which reading its text has to pay."""

    def uniform_prices(
        self, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
    ) -> NDArray[float64]:
        """Return the seconds of steps in which all rows draft alike. [num_drafters, max_k + 1]

        paying: number of rows whose drafts are charged: drafting for these alone, and their share of what all
        drafts add to the pass.
        """

    def allocate(
        self, base: Work, among: Candidates, *, unpaid_s: float = 0.0, drafted: bool = False
    ) -> Allocation:
        """Return the number of drafts with the highest goodput, the smallest among equals.

        unpaid_s: seconds of the step that are not decoding's: prefill chunks, due in any case.
        drafted: the drafts are made, and only their verification is to be paid.
        """

    def plan_in_one_call(
        self, view: StepView, known: KnownDrafters, row_drafter: NDArray[int64]
    ) -> StepChoice | None:
        """Choose like `DrafterChoice.choose_row_by_row` in one compiled call; None if there is none.

        row_drafter: drafter of every row of the engine.
        """

    def trim_in_one_call(
        self, base: Work, view: StepView, known: KnownDrafters, drafted: Drafted, unpaid_s: float, exempt_row: int
    ) -> NDArray[int64] | None:
        """Trim like `DrafterChoice.trim` in one compiled call; None if there is none. [n]"""
