"""Change budgets of rows under the law `typical`.

The engine's own law is `typical` or `coupled`. A request states its share of changed tokens, or takes the
engine's. Its open response counts changed tokens, so the counts outlast a preemption. Of an answer that began
elsewhere only the tokens behind `told` count: each part keeps the budget, and so does the whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.control.gaps import GapRecord
from paceline.core.errors import RequestError
from paceline.core.params import TYPICAL, Speculation, shown
from paceline.verify.typical import Tolerance, Typical, most_changed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from paceline.core.nouns import Batch, Draft, Mismatches, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.engine.output import Response

PER_REQUEST = frozenset({TYPICAL, "coupled"})  # laws that requests may choose between: both take the same drafts


class ChangeBudgets:
    """Budgets of rows, and the gaps of mismatches that the budgets are spent on."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self.usual: float | None = None  # budget of requests that state none; None: `typical` needs a stated one
        self._eos_ids = eos_ids
        self._gaps = GapRecord()

    def settled(self, request: Request, engine_law: str) -> Request:
        """Return a request with its change budget, None under another law. Raises `RequestError`.

        An answer with a grammar is under `coupled`: its masks are made for the target's own choices.
        """
        asked = request.speculation or Speculation()
        law = asked.law or engine_law
        if law != engine_law and not {law, engine_law} <= PER_REQUEST:
            known = sorted(PER_REQUEST) if engine_law in PER_REQUEST else [engine_law]
            raise RequestError(f"speculation.law is {' or '.join(known)} here, not {shown(law)}", "speculation")
        if law != TYPICAL:
            if asked.budget is not None:
                raise RequestError(f"speculation.budget goes with the law {TYPICAL}, not {law}", "speculation")
            return request
        budget = self.usual if asked.budget is None else asked.budget
        if budget is None:
            raise RequestError(
                f"the law {TYPICAL} needs speculation.budget, the largest share of changed tokens, such as 0.02",
                "speculation",
            )
        budget = None if request.params.grammar is not None else budget
        return replace(request, speculation=replace(asked, budget=budget))

    def prepare(self, open_: Mapping[str, Response], batch: Batch, draft: Draft, changing: set[int]) -> None:
        """Note in `changing` the rows that may change a token in this pass.

        Only these rows need logits. open_: responses with a budget, by request id.
        """
        for r, drafted in zip(batch.rows, draft.rows, strict=True):
            response = open_.get(r.request_id)
            budget = 0.0 if response is None else response.state.request.change_budget or 0.0
            may = response is not None and (
                most_changed(budget, _num_tokens(response) + len(drafted)) > response.changed_tokens
            )
            (changing.add if may and len(drafted) else changing.discard)(r.row)

    def tolerances(
        self, open_: Mapping[str, Response], batch: Batch, changing: Collection[int]
    ) -> list[Tolerance | None]:
        """Return what rows may change; None for rows not in `changing`. open_: as in `prepare`."""
        return [
            self._tolerance(open_[r.request_id]) if r.row in changing and r.request_id in open_ else None
            for r in batch.rows
        ]

    def judge(self, tolerances: Sequence[Tolerance | None], draft: Draft, scores: Scores) -> Verdict:
        """Judge a step, and learn from its mismatches."""
        verdict = Typical(tolerances).judge(draft, scores)
        for row in verdict.rows:
            if row.mismatches is not None:
                self._gaps.learn(len(row.token_ids), row.mismatches.gaps)
        return verdict

    def count(self, response: Response, mismatches: Mismatches, num_tokens: int) -> int:
        """Count and return the changed tokens of a pass. num_tokens: tokens up to the stop."""
        count, nats = mismatches.changed(num_tokens)
        response.changed_tokens += count
        response.changed_nats += nats
        return count

    def forget(self) -> None:
        """Forget the gaps that were learnt."""
        self._gaps = GapRecord()

    def _tolerance(self, response: Response) -> Tolerance:
        request, num_tokens = response.state.request, _num_tokens(response)
        budget, num_changed = request.change_budget or 0.0, response.changed_tokens
        reach = self._gaps.reach(budget, budget * (num_tokens + 1) - num_changed)
        ends = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ends |= self._eos_ids
        return Tolerance(budget, num_tokens, num_changed, reach, ends)


def _num_tokens(response: Response) -> int:
    """Return the tokens of an answer that this engine wrote."""
    return response.checker.num_tokens - len(response.state.request.told)
