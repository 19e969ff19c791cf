"""The replica of an answer, and whether there is one."""

from __future__ import annotations

import asyncio

from hypothesis import example, given
from hypothesis import strategies as st

from paceline.serve.engines import Answers
from paceline.serve.fleet.dispatch import Dispatch
from paceline.serve.fleet.fleet_metrics import FleetMetrics
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.fleet.journal import OngoingAnswer
from paceline.serve.fleet.member import Member
from tests.serve.fleet.fake_engines import FakeEngines, request_of

STATES = st.sampled_from(("up", "silent", "draining", "down"))
KEYS = st.sampled_from(("one", "two"))


@given(
    st.lists(st.tuples(STATES, KEYS, st.booleans()), min_size=1, max_size=4),
    st.sampled_from(("", "one", "two")),
    st.sampled_from(("on", "any")),
    st.booleans(),
)
@example([("silent", "one", False)], "two", "any", False)
def test_asking_for_a_replica_says_whether_one_is_found(
    replicas: list[tuple[str, str, bool]], promise: str, resume: str, without_first: bool
) -> None:
    async def scenario() -> None:
        members = {}
        request = request_of("r")
        answer = OngoingAnswer(request, Answers(FakeEngines(), {"r": 0}), promise=promise)
        for number, (state, key, banned) in enumerate(replicas):
            engines = FakeEngines(key)
            members[str(number)] = member = Member(str(number), engines)
            member.silent, member.draining = state == "silent", state == "draining"
            if state == "down":
                engines.ready = None
            if banned:
                answer.banned.add((str(number), engines.restarts))
        dispatch = Dispatch(ReplicaOptions(resume=resume), members, FleetMetrics(members))
        without = {"0"} if without_first else set()
        found = dispatch.choose(answer, without)
        assert dispatch.can_place(answer, without, silent=True) == (found is not None)
        if found is not None and not found[0].silent:
            assert dispatch.can_place(answer, without)

    asyncio.run(scenario())
