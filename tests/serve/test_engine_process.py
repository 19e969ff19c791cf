"""The engine's side of the line: who comes while a pass runs comes along in the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.core.nouns import Request
from paceline.core.params import SamplingParams
from paceline.engine.wire import Submit
from paceline.serve.engine_process import Worker
from paceline.serve.messages import Outcomes, Stop
from tests.engine.same_text import PLAIN, make_engine, target
from tests.engine.test_ahead import TYPES

if TYPE_CHECKING:
    from paceline.serve.messages import ToEngine, ToServer

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)


def submit(name: str) -> Submit:
    return Submit.of(Request(name, (40, 50, 60), PARAMS, seed=1))


class Line:
    """A line on which some messages are there whenever the engine looks."""

    def __init__(self, *looks: list[ToEngine]) -> None:
        self._looks = list(looks)
        self.sent: list[ToServer] = []

    def receive(self, _: int) -> ToEngine | None:
        if self._looks[0]:
            return self._looks[0].pop(0)
        del self._looks[0]
        return None

    def send(self, message: ToServer) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(
    ("num_cores", "looks"),
    [
        (3, [[submit("a")], [], [submit("b")], [], [Stop()]]),  # twice for each step but the first
        (2, [[submit("a")], [], [submit("b")], [Stop()]]),
    ],
)
def test_who_comes_while_a_pass_runs_comes_along(
    num_cores: int, looks: list[list[ToEngine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target(TYPES).decoder, "num_cores", num_cores)
    line = Line(*[list(look) for look in looks])
    engine = make_engine("off", PLAIN, types=TYPES)
    Worker(engine, line).run()  # type: ignore[arg-type]
    told = [[o.request_id for o in m.outcomes] for m in line.sent if isinstance(m, Outcomes)]
    if num_cores == 3:  # the third pass has begun, and is not over
        assert told == [["a"], ["a"]]
        assert [r.in_flight for r in engine.scheduler.running] == [1, 1]
    else:
        assert told == [["a"], ["a"], ["a", "b"]]
