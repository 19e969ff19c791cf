"""After a step: what it was to take, what it took, and what its tokens would have taken without drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.control.cost import Work
from paceline.control.cruise import MANY_ROWS
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.control.online import OnlineCost
    from paceline.control.policy import Decision, Outcomes, StepView


@noun
class Reckoning:
    """What a controller that knows costs makes of a step that is over."""

    measured_s: float  # that a step took
    predicted_s: float  # that such a step takes, by what was known before it
    plain_s: float  # that the same tokens would have taken without drafts


def learn_cost(
    cost: OnlineCost,
    view: StepView,
    decision: Decision,
    outcomes: Outcomes,
    prefill: Work,
    *,
    settled: bool = True,
) -> Reckoning:
    """Do what `learn_cost_slow` does in one compiled call."""
    ks, drafters = _drafted(decision, outcomes)
    o, seconds = outcomes, (outcomes.draft_s, outcomes.target_s, outcomes.host_s)
    rows = view.rows, view.lengths, o.rows, o.num_verified, o.num_accepted, ks, drafters
    return Reckoning(*cost.compiled.learn(*rows, prefill.of_one, seconds, settled, len(o.rows) < MANY_ROWS))


def _drafted(decision: Decision, outcomes: Outcomes) -> tuple[NDArray[int64], NDArray[int64]]:
    """Return how many drafts were made for each row, and by whom; if nobody says, as planned."""
    if outcomes.num_drafted is None:
        return decision.ks, decision.drafters
    return outcomes.num_drafted, outcomes.drafters


def learn_cost_slow(
    cost: OnlineCost,
    view: StepView,
    decision: Decision,
    outcomes: Outcomes,
    prefill: Work,
    *,
    settled: bool = True,
) -> Reckoning:
    """Compare a step with what it was to cost, its prefill being known now, and correct the prices.

    settled: the step before was of its kind. A pass without drafts takes longer after one with them, as drafting
    has put other things into the caches; what plain decoding costs, it does not say.
    """
    known = dict(zip(view.rows.tolist(), view.lengths.tolist(), strict=True))
    lengths = [known.get(row, 0) for row in outcomes.rows.tolist()]
    verified = outcomes.num_verified.tolist()
    done, plain = _passes(lengths, verified)
    done = done + prefill if prefill.tokens else done
    drafting = cost.drafting_of(*_drafted(decision, outcomes))
    plain_s, done_s = cost.pass_s(plain), cost.pass_s(done)
    prefill_s = max(cost.pass_s(plain + prefill) - plain_s, 0.0) if prefill.tokens else 0.0
    rows, drafts = len(lengths), sum(drafting) > 0 or any(verified)
    plain_s += cost.host(rows, drafts=False)
    predicted_s = max(sum(drafting) + done_s + cost.host(rows, drafts=drafts), 1e-9)
    measured_s = outcomes.draft_s + outcomes.target_s + outcomes.host_s
    gained = 1 + sum(outcomes.num_accepted.tolist()) / max(len(lengths), 1)  # steps that a step stands for
    share = min(
        (prefill_s + gained * plain_s) / predicted_s, gained
    )  # no step takes longer for what it leaves out
    reckoning = Reckoning(measured_s, predicted_s, measured_s * share)
    dear = [drafter for drafter, seconds in enumerate(drafting) if seconds > 0]
    if len(dear) == 1 and not prefill.tokens:  # else it is not told apart: other drafters', or taking in prompts
        cost.observe_drafting(dear[0], drafting[dear[0]], outcomes.draft_s)
    if settled:
        cost.observe_pass(done, outcomes.target_s, prefills=bool(prefill.tokens))
    if not prefill.tokens and (drafts or rows < MANY_ROWS):  # of more, a plain step that was chosen is a rare one
        cost.host.observe(rows, outcomes.host_s, drafts=drafts)
    return reckoning


def _passes(lengths: Sequence[int], ks: Sequence[int]) -> tuple[Work, Work]:
    """Return the work of verifying so many drafts of rows so long, and of none."""
    keys = sum(lengths)
    pairs = keys + sum(k * length + k * (k + 1) // 2 for k, length in zip(ks, lengths, strict=True))
    return Work(len(lengths) + sum(ks), 0, keys, pairs), Work(len(lengths), 0, keys, keys)
