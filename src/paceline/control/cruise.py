"""A choice that holds for some steps: what nothing new would change need not be chosen again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.cost import Work
from paceline.control.policy import NONE, StepView, plain

if TYPE_CHECKING:
    from paceline.control.policy import Decision

CRUISE = 8  # steps that a choice may hold for ...
MUCH = 6  # ... unless so many drafts are offered: a drafter hardly makes more
MANY_ROWS = 12  # from which it pays to hold choices: what drafts bring there is little more than choosing costs
DRAFTING = 4  # steps that a choice to draft holds for such many rows; one not to does for `CRUISE` ...
LONGEST = 16  # ... and twice as many when it is made again: longer, and what begins to repeat itself is missed


class Cruise:
    """The last choice, and for what it was made."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Hold nothing: the last choice was for its step alone."""
        none = np.zeros(0, np.int64)
        self._view = StepView(none, none, none, Work(0))
        self._chosen = plain(self._view)
        self._every = 1  # steps of many rows with the same choice
        self._plainly = CRUISE  # the same of the next choice not to draft
        self._drafts = self._stopping = False

    @property
    def for_its_step(self) -> bool:
        """Whether the last choice is for its step alone: drafts without stops, chosen by what was offered then."""
        return self._drafts and not self._stopping and self._every == 1

    @property
    def seconds(self) -> float:
        """What a step of the last choice is expected to take."""
        return self._chosen.seconds

    def keep(self, view: StepView, chosen: Decision, *, lasting: bool) -> None:
        """Remember a choice; who is given up with it is so once. lasting: it was not made to find out.

        Where some of what was offered is taken, as where texts repeat themselves, every step is worth a look.
        """
        self._view, self._chosen = view, replace(chosen, given_up=()) if chosen.given_up else chosen
        many = view.num_rows >= MANY_ROWS and view.offers.keys().isdisjoint(chosen.drafters.tolist())
        self._drafts, self._every = any(chosen.ks.tolist()), 1
        self._stopping = len(chosen.stops) == view.num_rows
        if lasting and many:
            self._every = DRAFTING if self._drafts else self._plainly
        if lasting:
            self._plainly = min(2 * self._plainly, LONGEST) if many and not self._drafts else CRUISE

    def carries_on(self, step: int) -> bool:
        """Whether nobody need look at what could be drafted in a step: a choice for many rows still holds."""
        return step % self._every != 0

    def rests(self, step: int, rows: int) -> bool:
        """Whether nothing is drafted in a step of so many rows, as that choice still holds."""
        return rows >= MANY_ROWS and self.carries_on(step) and not self._drafts

    def held(self, view: StepView, step: int, *, asks: bool = True) -> Decision | None:
        """Return the last choice if it holds for a step, too: for many rows, or for the same few.

        asks: there is somebody to draft beside those that offer.
        """
        if view.out and not view.out.isdisjoint(self._chosen.drafters.tolist()):
            return None
        if view.num_rows >= MANY_ROWS and self.carries_on(step) and not (view.wishes or view.targets):
            return self._carried_on(view)
        stops = self._stopping and _offered(view) < MUCH
        holds = self._of_the_same(view, step) and (stops or not (asks or self._drafts or _offered(view)))
        return self._within(view) if holds else None

    def _carried_on(self, view: StepView) -> Decision:
        """Return the choice for rows of which some are gone, or new: these do not draft yet.

        A request that was given an ended one's row takes over what was chosen for that, until the next choice.
        """
        chosen = self._chosen
        if not chosen.ks.any():
            return replace(plain(view), seconds=chosen.seconds, tokens=float(view.num_rows))
        before = {row: index for index, row in enumerate(self._view.rows.tolist())}
        places = np.array([before.get(row, -1) for row in view.rows.tolist()])
        known = places >= 0
        ks = np.minimum(np.where(known, chosen.ks[places], 0), view.most)
        return replace(chosen, ks=ks, drafters=np.where(ks > 0, chosen.drafters[places], NONE))

    def _of_the_same(self, view: StepView, step: int) -> bool:
        """Whether the same rows decode and nothing else has come up that a choice depends on."""
        return (
            step % CRUISE != 0
            and not (view.prefill.tokens or self._view.prefill.tokens or view.wishes or view.targets)
            and view.num_rows > 0
            and view.rows.tolist() == self._view.rows.tolist()
        )

    def _within(self, view: StepView) -> Decision:
        """Return the choice within what rows may have now."""
        chosen = self._chosen
        ks = np.minimum(chosen.ks, view.most)
        return chosen if ks.tolist() == chosen.ks.tolist() else replace(chosen, ks=ks)


def _offered(view: StepView) -> int:
    """Return the most drafts that any row is offered."""
    return max((offer.shape[1] for offer in view.offers.values()), default=0)
