"""Answers of one engine that run or wait, and what its messages bring to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.engine.wire import error_of

if TYPE_CHECKING:
    from paceline.core.errors import PacelineError
    from paceline.serve.engines import Answers
    from paceline.serve.worker.messages import OutcomeBatch, Rejected


class OpenAnswers:
    """Open answers by request id."""

    def __init__(self) -> None:
        self._by_id: dict[str, Answers] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def ids(self) -> list[str]:
        """Return the ids of open requests."""
        return list(self._by_id)

    def add(self, answers: Answers) -> None:
        """Keep answers until they end."""
        self._by_id |= dict.fromkeys(answers.index, answers)

    def remove(self, answers: Answers) -> list[str]:
        """Take out those still open, which get no further event; return their ids."""
        still_open = list(answers.index)
        answers.index.clear()
        for request_id in still_open:
            if self._by_id.get(request_id) is answers:  # not a later request of the same id
                del self._by_id[request_id]
        return still_open

    def bring(self, batch: OutcomeBatch) -> None:
        """Bring outcomes to their answers. Those of cancelled requests are dropped."""
        for outcome in batch.outcomes:
            answers = self._by_id.get(outcome.request_id)
            if answers is not None:
                answers.put((answers.index[outcome.request_id], outcome))
                if outcome.finish_reason is not None:
                    self._forget(outcome.request_id)

    def reject(self, rejected: Rejected) -> None:
        """End the answer to a refused request with its error."""
        answers = self._by_id.get(rejected.request_id)
        if answers is not None:
            self._forget(rejected.request_id)
            answers.put(error_of(rejected.kind, rejected.message, rejected.param))

    def fail(self, error: PacelineError) -> None:
        """End all with an error, which each caller gets once."""
        each = {id(answers): answers for answers in self._by_id.values()}
        self._by_id.clear()
        for answers in each.values():
            answers.index.clear()
            answers.put(error)

    def _forget(self, request_id: str) -> None:
        self._by_id.pop(request_id).index.pop(request_id)
