"""A choice that holds for some steps: what nothing new would change need not be chosen again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.policy import plain

if TYPE_CHECKING:
    from paceline.control.policy import Decision, View

CRUISE = 8  # steps that a choice may hold for ...
MUCH = 6  # ... unless so many drafts are offered: a drafter hardly makes more


class Cruise:
    """The last choice, and for what it was made."""

    def __init__(self, view: View) -> None:
        self._view, self._chosen = view, plain(view)

    def keep(self, view: View, chosen: Decision) -> None:
        """Remember a choice; who is given up with it is so once."""
        self._view, self._chosen = view, replace(chosen, given_up=())

    def held(self, view: View, step: int) -> Decision | None:
        """Return the last choice if it holds for a step, too: the same rows draft, and nobody offers much.

        A choice without stops is for its step only: how far it goes was chosen by what was offered then.
        """
        before, chosen = self._view, self._chosen
        holds = (
            step % CRUISE != 0
            and len(chosen.stops) == view.num_rows > 0
            and not any(offer.shape[1] >= MUCH for offer in view.offers.values())
            and not (view.prefill.tokens or before.prefill.tokens or view.wishes or view.targets)
            and np.array_equal(view.rows, before.rows)
        )
        if not holds:
            return None
        return chosen if (chosen.ks <= view.most).all() else replace(chosen, ks=np.minimum(chosen.ks, view.most))
