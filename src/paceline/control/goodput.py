"""Paceline's own policy: every step has the drafts that raise its expected tokens per second the most.

After TurboSpec (arXiv 2406.14066), which made goodput the aim, and DSpark (arXiv 2607.05147), which shares it out
among rows. Ours looks at each row, chooses among drafters, leaves the time of prefill chunks out of the account
(it is due in any case), and never stops finding out: one hundredth of the time may go into drafts that do not seem
to pay. A drafter that could not pay in many steps, at the best that its probes admit, is given up.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.choice import Candidates, gained_by, with_prefill
from paceline.control.cost import Work
from paceline.control.cruise import Cruise
from paceline.control.hopes import Hopes
from paceline.control.objective import Objective, Pace
from paceline.control.policy import NONE, Decision, Drafted, Outcomes, StepView, plain
from paceline.control.probes import Probes
from paceline.control.quick import Known, QuickSurvival, alive_now, choose, learn_all, plan, stops, trim
from paceline.control.stance import Stance
from paceline.control.stopping import Prices
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.choice import Allocation
    from paceline.control.cost import StepCost
    from paceline.core.nouns import Stop

    Choices = tuple[NDArray[int64], NDArray[int64]]  # drafts of each row, and their drafter
    Whole = tuple[NDArray[int64], Allocation, float]  # each row's drafter, how far they go, seconds of the prefill

PROBE_EVERY = 8  # steps between two looks at whether to probe ...
PROBE_EVERY_OF_SEVERAL = 16  # ... of several rows: steps tell more, less is to be had, and a look takes long
SEVERAL_ROWS = 8  # from which a look is as rare
ASKED_MARGIN = 0.03  # what no step shows: prompts that are read first, states that are kept, caches left to a head
ROOM = 4  # drafts that a row may have, for a look at whether they could pay
OPTIMISM = 2.0  # standard deviations: what could pay
ASSIGN_EVERY = 8  # steps between two looks at which drafter suits a row
LEAST_AT_STAKE = 0.006  # seconds that a step's drafts cost, for trimming to save more than it takes


@noun
class _Planned:
    """What a step was planned with."""

    prefill_s: float = 0.0
    at_stake_s: float = np.inf  # what its drafts cost


class Goodput:
    """Chooses for every row and step which drafter drafts how far."""

    def __init__(
        self,
        cost: StepCost,
        num_rows: int,
        max_ks: Sequence[int],
        priors: Sequence[NDArray[float64] | None] | None = None,
        objective: Objective | None = None,
        minding: Collection[int] = (),
    ) -> None:
        """`max_ks` and `priors` (chances by depth, if known) are by drafter. minding: those that heed stops."""
        self.cost = cost
        self._pace = Pace(num_rows, objective or Objective())
        known = priors or [None] * len(max_ks)
        self.survival = [QuickSurvival(num_rows, k, p) for k, p in zip(max_ks, known, strict=True)]
        self._max_k = max(max_ks, default=0)
        self._own = np.zeros(num_rows, np.int64)  # drafter of each row, of those that offer nothing
        self._fresh = set(range(num_rows))  # rows that nobody has chosen a drafter for
        self._prices = Prices(len(max_ks), self._max_k)
        self._minding = [s.estimates if index in minding else None for index, s in enumerate(self.survival)]
        self._stance = Stance()
        self._goodput = 0.0  # tokens per second expected of the last step
        self._hopes = Hopes(len(max_ks), self._max_k)
        self._planned = _Planned()
        self._probes = Probes()
        self._steps = 0
        self._cruise = Cruise()

    def twin(self) -> Goodput:
        """As `Policy.twin`."""
        other = copy(self)
        other._cruise, other._planned = Cruise(), _Planned()
        other._probes, other._stance = self._probes.twin(), self._stance.twin()
        other._steps, other._goodput = 0, 0.0
        return other

    def admit(self, row: int) -> None:
        """A request begins in a row."""
        self._fresh.add(row)
        self._hopes.admit()
        self._pace.admit(row)
        for survival in self.survival:
            survival.admit(row)

    # Before a step -------------------------------------------------------------------------------

    @property
    def looks(self) -> bool:
        """Whether it wants to see what drafters that cost nothing would propose in the next step."""
        return not self._cruise.carries_on(self._steps + 1)

    def rest(self, rows: int) -> bool:
        """As `Policy.rest`."""
        if rests := self._cruise.rests(self._steps + 1, rows):
            self._steps += 1
            self._probes.earn(self._cruise.seconds)
        return rests

    def hold(self, view: StepView) -> Decision | None:
        """As `Policy.hold`."""
        if not view.num_rows or self._cruise.for_its_step:
            return None
        asks = len(view.offers) + len(self._hopes.gone) < len(self.survival)
        held = self._cruise.held(view, self._steps + 1, asks=asks)
        if held is not None:
            self._steps += 1
            self._probes.row = NONE
            self._probes.earn(held.seconds)
        return held

    def decide(self, view: StepView) -> Decision:
        """Decide for every row of a step."""
        return self.hold(view) or self.choose(view)

    def choose(self, view: StepView) -> Decision:
        """As `Policy.choose`."""
        if not view.num_rows or not self.survival:
            return plain(view)
        self._steps += 1
        self._probes.row = NONE
        paced = self._pace.promise(view.targets)
        drafters, chosen, unpaid_s = self._in_turn(view) if paced else self._which(view)
        no_ks = np.zeros(view.num_rows, np.int64)
        ks, seconds, speedup = no_ks, chosen.plain_seconds, 1.0
        if self._stance.take(chosen, self._steps):
            ks, seconds, speedup = chosen.ks, chosen.seconds, self._stance.speedup
        self._probes.earn(seconds)
        as_chosen = ks is chosen.ks and not paced
        given_up: tuple[int, ...] = ()
        dearer_s = chosen.plain_seconds * (self._stance.speedup - 1.0)
        if self._probes.plain_is_due(self._steps, any(ks.tolist()), dearer_s, wished=bool(view.wishes)):
            ks, seconds, speedup, as_chosen = no_ks, chosen.plain_seconds, 1.0, False
        else:
            ks, drafters, given_up = self._find_out(view, (ks, drafters), seconds + unpaid_s)
        gained = None if as_chosen and self._probes.row == NONE else self._gained(view, drafters, ks)
        tokens = chosen.tokens if gained is None else float(gained.sum())
        self._goodput = tokens / seconds
        self._planned = _Planned(unpaid_s, np.inf if paced else seconds - chosen.plain_seconds)
        budget, prefill_s = self._pace.budget(view, gained, seconds, unpaid_s) if paced else (None, unpaid_s)
        ks, drafters, ends = self._with_stops(view, ks, drafters)
        decision = Decision(ks, drafters, seconds + prefill_s, tokens, speedup, budget, given_up, ends)
        drafts, usual = any(ks.tolist()), self._probes.row == NONE and not self._probes.once_more
        self._stance.promise((view.num_rows, tokens, seconds, drafts) if usual and not paced else None)
        if paced:  # who is in haste changes from step to step
            self._cruise.forget()
        else:
            self._cruise.keep(view, decision, lasting=usual and drafts == self._stance.speculates)
        return decision

    def _which(self, view: StepView) -> Whole:
        """Choose drafters and drafts: beside what is offered, others only where these win clearly."""
        found = self._at_once(view) or self._in_turn(view)
        planned = zip(found[0].tolist(), found[1].ks.tolist(), strict=True)
        offered = not view.wishes and any(offer.size for offer in view.offers.values())
        if not offered or not any(k and drafter not in view.offers for drafter, k in planned):
            return found
        without = replace(view, out=view.out.union(self._asked(view)))
        alone = self._at_once(without) or self._in_turn(without)
        return found if found[1].speedup > (1 + ASKED_MARGIN) * alone[1].speedup else alone

    def _at_once(self, view: StepView) -> Whole | None:
        """Choose drafters and drafts in one call, where no row's own drafter is to be chosen; else None."""
        asked, costs = self._asked(view), self.cost.compiled
        if costs is None or view.wishes or (len(asked) > 1 and self._renews(view)):
            return None
        if len(self.survival) > 1:  # prices tell which of several is worth more
            self._prices.renew(self.cost, view, self._steps)
        return plan(costs, view, self._known(view), self._own, asked[0] if len(asked) == 1 else NONE)

    def _known(self, view: StepView) -> Known:
        out = self._out(view)
        estimates = [None if index in out else s.estimates for index, s in enumerate(self.survival)]
        return Known(estimates, self._prices.table, self._goodput / self._prices.rows)

    def _out(self, view: StepView) -> frozenset[int]:
        """Return the drafters that nothing can be had from, in this step or for good."""
        return view.out | self._hopes.gone

    def _in_turn(self, view: StepView) -> Whole:
        """Choose each row's drafter, then how far each goes; and tell the seconds of the prefill."""
        base, unpaid_s = with_prefill(self.cost, view)
        alive = self.expected(view)
        drafters = self._assign(view, alive)
        chosen = self._best(view, base, alive, drafters, unpaid_s, self._pace.urgency(view.rows))
        return drafters, chosen, unpaid_s

    def _renews(self, view: StepView) -> bool:
        """Whether rows' own drafters are chosen again."""
        return self._steps % ASSIGN_EVERY == 0 or not self._fresh.isdisjoint(view.rows.tolist())

    def _gained(self, view: StepView, drafters: NDArray[int64], ks: NDArray[int64]) -> NDArray[float64]:
        """Return the tokens expected of each row. [n]"""
        return gained_by(self.expected(view), drafters, ks) if any(ks.tolist()) else np.ones(view.num_rows)

    def _with_stops(
        self, view: StepView, ks: NDArray[int64], drafters: NDArray[int64]
    ) -> tuple[NDArray[int64], NDArray[int64], dict[int, Stop]]:
        """Let rows go as deep as drafters say that it pays; the one that finds out goes as far as planned."""
        planned = [d if k else NONE for d, k in zip(drafters.tolist(), ks.tolist(), strict=True)]
        if not any(self._minding[drafter] for drafter in set(planned) - {NONE}):
            return ks, np.array(planned), {}
        self._prices.renew(self.cost, view, self._steps)
        return stops(self._minding, self._prices, self._goodput, view, (ks, drafters), self._probes.row)

    def _best(
        self,
        view: StepView,
        base: Work,
        alive: NDArray[float64],
        drafters: NDArray[int64],
        unpaid_s: float = 0.0,
        weights: NDArray[float64] | None = None,
    ) -> Allocation:
        """Return how far each row goes with its drafter. alive: [num_drafters, num_rows, max_k]"""
        own = alive[drafters, np.arange(view.num_rows)] if len(alive) > 1 else alive[0]
        counted = own if weights is None else own * weights[:, None]
        plain_tokens = view.num_rows if weights is None else float(weights.sum())
        among = Candidates(counted, view.most, view.lengths, drafters, plain_tokens)
        return choose(self.cost, base, among, unpaid_s=unpaid_s)

    def expected(self, view: StepView, optimism: float = 0.0) -> NDArray[float64]:
        """Return how likely every drafter's drafts are kept, 0 beyond its deepest. [num_drafters, num_rows, max_k]

        What a drafter would propose is known if it offers: then nothing more is to be hoped for.
        """
        found, out = np.zeros((len(self.survival), view.num_rows, self._max_k)), self._out(view)
        for index, survival in enumerate(self.survival):
            if index not in out:
                offer = view.offers.get(index)
                hope = optimism if offer is None else 0.0
                found[index] = survival.alive(view.rows, self._max_k, offer, optimism=hope)
        return found

    def _assign(self, view: StepView, alive: NDArray[float64]) -> NDArray[int64]:
        """Return each row's drafter: what was offered if it is worth more than the row's own drafter, or that."""
        if len(self.survival) == 1:
            return np.zeros(view.num_rows, np.int64)
        renews = self._renews(view)
        if not renews and not any(offer.size for offer in view.offers.values()):
            drafters = self._own[view.rows]
        else:
            drafters = self._compare(view, self._worth(view, alive), renews=renews)
        for row, wish in view.wishes.items():
            drafters[view.rows == row] = wish
        return drafters

    def _compare(self, view: StepView, worth: NDArray[float64], *, renews: bool) -> NDArray[int64]:
        """Return each row's best. `renews`: its own, of those that offer nothing, is chosen again."""
        asked = self._asked(view)
        if renews and asked:
            self._own[view.rows] = np.array(asked)[worth[asked].argmax(axis=0)]
        if renews:
            self._fresh.difference_update(view.rows.tolist())
        drafters = self._own[view.rows]
        for offered in view.offers:
            drafters[worth[offered] > worth[drafters, np.arange(view.num_rows)]] = offered
        return drafters

    def _asked(self, view: StepView) -> list[int]:
        """Return the drafters that offer nothing by themselves, and can be asked."""
        out = self._out(view)
        return [d for d in range(len(self.survival)) if d not in view.offers and d not in out]

    def _worth(self, view: StepView, alive: NDArray[float64]) -> NDArray[float64]:
        """Return how many tokens each drafter is worth to each row, its time priced at the goodput.

        [num_drafters, num_rows]
        """
        self._prices.renew(self.cost, view, self._steps)
        tokens = np.add.accumulate(alive, axis=2)
        tokens -= (self._prices.table * (self._goodput / self._prices.rows))[:, None]
        found: NDArray[float64] = tokens.max(axis=2)
        return np.maximum(found, 0.0, out=found)

    def _find_out(
        self, view: StepView, chosen: Choices, seconds: float
    ) -> tuple[NDArray[int64], NDArray[int64], tuple[int, ...]]:
        """Now and then look for drafters without hope, and let a row go further than seems to pay, to find out.

        Returns the drafts and the drafter of each row, and the drafters that are given up.
        """
        self._probes.row = NONE
        every = PROBE_EVERY if view.num_rows < SEVERAL_ROWS else PROBE_EVERY_OF_SEVERAL
        if self._steps % every:
            return *chosen, ()
        (ks, drafters), (base, _) = chosen, with_prefill(self.cost, view)
        alive, times = self.expected(view), self._probes.looks(self._steps, PROBE_EVERY)
        could = {d: self._could_pay(view, base, alive, chosen, d) for d in self._asked(view)}
        doubtful = [d for d, could_pay in could.items() if self._hopes.look(d, could_pay, times)]
        hoped = self._best(view, base, self.expected(view, OPTIMISM), drafters).ks
        further = hoped, drafters
        if doubtful and not (hoped > ks).any():
            tried = doubtful[self._steps // PROBE_EVERY % len(doubtful)]
            deeper = np.minimum(np.minimum(view.most, ks + 1), self.survival[tried].max_depth)
            deeper[np.isin(view.rows, list(view.wishes))] = 0  # these have a drafter of their request's choice
            further = deeper, np.full_like(drafters, tried)
        return *self._probe(view, base, chosen, further, seconds), self._hopes.give_up()

    def _could_pay(
        self, view: StepView, base: Work, alive: NDArray[float64], chosen: Choices, drafter: int
    ) -> bool:
        """Whether a drafter, at its best, would pay beside what is offered, or for one row alone.

        What does not pay for many rows may pay for one, which is yet to come.
        """
        if drafter in view.wishes.values() or not (view.most >= ROOM).any() or drafter in chosen[1][chosen[0] > 0]:
            return True  # it is wanted anyhow, or nobody can tell, or it does
        best_case = self._hopes.best_case(drafter)
        keys = int(view.lengths.min())
        among = Candidates(best_case[None], np.full(1, self._max_k), np.full(1, keys), np.full(1, drafter), 1.0)
        if choose(self.cost, Work(1, 0, keys, keys), among).ks.any():
            return True
        supposed = alive.copy()
        supposed[drafter] = best_case
        whose = np.where(np.isin(chosen[1], list(view.offers)), chosen[1], drafter)
        return bool(self._best(view, base, supposed, whose).ks[whose == drafter].any())

    def _probe(self, view: StepView, base: Work, chosen: Choices, further: Choices, seconds: float) -> Choices:
        """Let one row go further than was chosen, if there is time for that."""
        ks, drafters = chosen
        (rows,) = np.nonzero(further[0] > ks)
        if not rows.size:
            return chosen
        index = rows[self._steps // PROBE_EVERY % rows.size]
        probing, whose = ks.copy(), drafters.copy()
        probing[index], whose[index] = further[0][index], further[1][index]
        if not self._probes.budget.afford(self.cost.price(base, view.lengths, probing, whose) - seconds):
            return chosen
        self._probes.row = int(view.rows[index])
        return probing, whose

    # Between drafting and the pass ---------------------------------------------------------------

    @property
    def trims(self) -> bool:
        """Whether so much is at stake that some of it may not be worth verifying."""
        return self._planned.at_stake_s >= LEAST_AT_STAKE

    def trim(self, view: StepView, drafted: Drafted) -> NDArray[int64]:
        """Return how much of each row's draft is verified, now that drafters have said how sure they are. [n]

        The same choice as before, over what was proposed. The time of drafting is spent, but it is part of the
        step: without it, time would seem to bring more than it does, and too much would be dropped.
        """
        base, _ = with_prefill(self.cost, view)
        unpaid_s = self._planned.prefill_s - self.cost.drafting_s(drafted.ks, drafted.drafters)
        weights = self._pace.urgency(drafted.rows)
        if weights is None:
            ks = trim(self.cost, base, view, self._known(view), drafted, unpaid_s, self._probes.row)
            if ks is not None:
                return ks
        by_row = np.zeros(len(self._own), np.int64)
        by_row[view.rows] = view.lengths
        alive, counts = self.alive(drafted), np.ones(len(drafted.rows)) if weights is None else weights
        lengths, plain_tokens = by_row[drafted.rows], float(counts.sum())
        among = Candidates(alive * counts[:, None], drafted.ks, lengths, drafted.drafters, plain_tokens)
        chosen = choose(self.cost, base, among, unpaid_s=unpaid_s, drafted=True)
        return np.where(drafted.rows == self._probes.row, drafted.ks, chosen.ks)

    def alive(self, drafted: Drafted) -> NDArray[float64]:
        """Return the chance of each draft to be kept, now that it is there. [n, max_k]"""
        return alive_now(self.survival, drafted, self._max_k)

    # After a step --------------------------------------------------------------------------------

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        """Take in what a step brought."""
        self._pace.learn(outcomes)
        if not view.prefill.tokens:
            self._stance.learn(outcomes)
        self._hopes.learn(outcomes, self._probes.row)
        self._probes.learn(self.cost, outcomes)
        learn_all(self.survival, outcomes)
