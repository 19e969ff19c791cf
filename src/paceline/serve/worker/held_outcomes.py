"""Outcomes of answers that nobody reads before their end: held, and told together."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from paceline.core.request_nouns import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.core.request_nouns import Request


class HeldOutcomes:
    """Gains of whole answers (not streamed) that their server does not know yet.

    Their first tokens are told at once, as times to them are measured, and so is their end, with all before it.
    The rest is told now and then, so that another replica could go on from there.
    """

    def __init__(self) -> None:
        self._whole: set[str] = set()  # open requests whose first tokens have been told, or will be
        self._held: dict[str, Outcome | None] = {}  # by request; None: nothing since its last outcome was told

    def expect(self, request: Request) -> None:
        """Note a request that begins."""
        if request.whole:
            self._whole.add(request.request_id)

    def take_in(self, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """Keep what may wait; return what is to be told now."""
        return [told for outcome in outcomes if (told := self._told(outcome)) is not None]

    def take_held(self) -> list[Outcome]:
        """Return all that has waited."""
        found = [outcome for outcome in self._held.values() if outcome is not None]
        self._held = dict.fromkeys(self._held)
        return found

    def _told(self, outcome: Outcome) -> Outcome | None:
        name = outcome.request_id
        if name not in self._whole:
            return outcome
        known = name in self._held
        held = self._held.get(name)
        whole = outcome if held is None else joined(held, outcome)
        if outcome.finish_reason is not None:
            self._whole.remove(name)
            self._held.pop(name, None)
            return whole
        self._held[name] = whole if known else None
        return None if known else whole


def joined(first: Outcome, then: Outcome) -> Outcome:
    """Return two outcomes of a request in a row as one. Neither begins the answer."""
    spent = then.spent if first.spent is None else first.spent.after(then.spent, len(then.token_ids))
    logprobs = None
    if first.logprobs is not None or then.logprobs is not None:
        logprobs = tuple(chain(first.logprobs or (), then.logprobs or ()))
    return Outcome(
        first.request_id,
        first.token_ids + then.token_ids,
        first.text + then.text,
        logprobs,
        then.finish_reason,
        then.stop_reason,
        then.figures,
        then.error,
        None,
        first.notes + then.notes,
        first.start,
        spent,
    )
