"""Open answers of an engine: each event reaches the answers that wait for it, once."""

from __future__ import annotations

import asyncio

from paceline.core.errors import EngineDied, RequestError
from paceline.core.request_nouns import Outcome
from paceline.serve.engines import Answers, Event
from paceline.serve.worker.messages import OutcomeBatch, Rejected
from paceline.serve.worker.open_answers import OpenAnswers

MORE, LAST = Outcome("a", (1,), "x"), Outcome("a", (2,), "y", finish_reason="stop")


def test_events_reach_open_answers_only() -> None:
    async def work() -> tuple[list[Event], list[Event]]:
        found, others = list[Event](), list[Event]()
        answers = Answers(None, {"a": 0, "b": 1}, found.append)  # type: ignore[arg-type]
        other = Answers(None, {"c": 0}, others.append)  # type: ignore[arg-type]
        table = OpenAnswers()
        table.add(answers)
        table.add(other)
        assert table.ids() == ["a", "b", "c"]
        table.bring(OutcomeBatch((MORE, LAST, LAST)))
        table.reject(Rejected("b", "RequestError", "no", "prompt"))
        table.reject(Rejected("b", "RequestError", "no", "prompt"))
        assert (table.ids(), answers.index) == (["c"], {})
        assert table.remove(other) == ["c"]
        table.fail(EngineDied("all that are open"))
        return found, others

    found, others = asyncio.run(work())
    assert found[:2] == [(0, MORE), (0, LAST)]
    assert isinstance(found[2], RequestError)
    assert (len(found), others) == (3, [])


def test_answers_to_several_requests_fail_once() -> None:
    async def work() -> list[Event]:
        found = list[Event]()
        answers, table = Answers(None, {"a": 0, "b": 1}, found.append), OpenAnswers()  # type: ignore[arg-type]
        table.add(answers)
        table.fail(EngineDied("gone"))
        assert (len(table), answers.index) == (0, {})
        table.bring(OutcomeBatch((LAST,)))
        return found

    (error,) = asyncio.run(work())
    assert isinstance(error, EngineDied)
