"""Routing: what no policy may do, what all must do, and the traps of prefixes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.control.routing import (
    COUNTED_PAGES,
    COUNTED_REQUESTS,
    ROUTES,
    CommonPages,
    ReplicaView,
    RequestView,
    RouteChoice,
    Router,
    decoding_s,
    policy_named,
)
from paceline.core.errors import ConfigError

STEPS = (0.010, 0.010, 0.012, 0.016)
READS_PAGES = ["seconds", "prefix"]


def replica(name: str, **values: object) -> ReplicaView:
    return ReplicaView(name, True, "k", 0, 0, 2e-4, STEPS)._replace(**values)


def router(name: str) -> Router:
    return Router(policy_named(name))


replicas = st.lists(
    st.builds(
        ReplicaView,
        st.uuids().map(str),
        st.booleans(),
        st.sampled_from(["k", "other"]),
        st.integers(0, 300),
        st.integers(0, 1 << 24),
        st.floats(0, 1) | st.just(float("nan")),
        st.sampled_from([(), (0.01,), STEPS]),
        st.integers(0, 40),
    ),
    max_size=6,
)
requests = st.builds(
    RequestView,
    st.integers(1, 1 << 20),
    st.lists(st.integers(0, 5), max_size=8),
    promise=st.sampled_from(["", "k", "third"]),
)


@given(name=st.sampled_from(list(ROUTES)), asked=st.lists(st.tuples(requests, replicas, st.data()), max_size=3))
def test_only_a_replica_that_may_have_it_gets_a_request(name, asked) -> None:
    route = router(name)
    for request, views, data in asked:
        banned = frozenset(data.draw(st.sets(st.sampled_from([v.name for v in views])))) if views else frozenset()
        may = {v.name for v in views if v.alive and v.name not in banned and request.promise in ("", v.promise)}
        choice = route.choose(replace(request, banned=banned), views)
        assert (choice.replica in may) if may else choice is None


@pytest.mark.parametrize("name", ROUTES)
def test_an_idle_fleet_uses_all(name) -> None:
    """Requests come one after another, each ended before the next, or all at once."""
    route, views = router(name), [replica(f"r{i}") for i in range(7)]
    chosen = [route.choose(RequestView(500, [i]), views).replica for i in range(7)]
    assert sorted(chosen) == [v.name for v in views]
    assert sent(router(name), views, [RequestView(500, [i]) for i in range(7)]) == dict.fromkeys(chosen, 1)


def sent(route: Router, views: list[ReplicaView], asked: list[RequestView], *, end: int = 1000) -> Counter[str]:
    """Send requests to replicas that keep all pages; each ends after `end` more. Return how many each got."""
    kept: dict[str, set[object]] = {v.name: set() for v in views}
    open_now: list[tuple[str, int]] = []
    got: Counter[str] = Counter()
    for request in asked:
        rows = Counter(name for name, _ in open_now)
        backlog = Counter()
        for name, tokens in open_now[-len(views) :]:  # the last ones are still in prefill
            backlog[name] += tokens
        choice = route.choose(
            request,
            [
                v._replace(
                    open_rows=rows[v.name],
                    backlog_tokens=backlog[v.name],
                    hit_pages=first_kept(request.page_hashes, kept[v.name]),
                )
                for v in views
            ],
        )
        hits = first_kept(request.page_hashes, kept[choice.replica])
        kept[choice.replica] |= set(request.page_hashes)
        open_now = [*open_now, (choice.replica, request.prompt_tokens - hits * request.page_tokens)][-end:]
        got[choice.replica] += 1
    return got


def first_kept(pages, kept) -> int:
    return next((i for i, page in enumerate(pages) if page not in kept), len(pages))


@pytest.mark.parametrize("name", READS_PAGES)
@pytest.mark.parametrize("system_pages", [1, 20, 200, 1000])
def test_a_shared_system_prompt_does_not_collapse_the_fleet(name, system_pages) -> None:
    system = [f"s{i}" for i in range(system_pages)]
    asked = [RequestView(16 * (system_pages + 8), [*system, *(f"{n}.{i}" for i in range(8))]) for n in range(160)]
    views = [replica(f"r{i}") for i in range(8)]
    got = sent(router(name), views, asked, end=24)
    assert max(got.values()) <= 1.5 * len(asked) / 8


@pytest.mark.parametrize("name", READS_PAGES)
def test_a_conversation_stays_where_its_pages_are(name) -> None:
    """Six conversations of growing length, in turn, on three replicas."""
    route, views = router(name), [replica(f"r{i}") for i in range(3)]
    asked = [
        RequestView(16 * 20 * (turn + 1), [f"c{c}.{i}" for i in range(20 * (turn + 1))])
        for turn in range(6)
        for c in range(6)
    ]
    kept: dict[str, set[object]] = {v.name: set() for v in views}
    homes: dict[int, set[str]] = {c: set() for c in range(6)}
    for n, request in enumerate(asked):
        now = [v._replace(hit_pages=first_kept(request.page_hashes, kept[v.name])) for v in views]
        choice = route.choose(request, now)
        assert choice.why == ("pages" if n >= 6 else "load")
        kept[choice.replica] |= set(request.page_hashes)
        homes[n % 6].add(choice.replica)
    assert all(len(home) == 1 for home in homes.values())


def test_a_hot_replica_is_left_when_waiting_takes_longer_than_prefill() -> None:
    request = RequestView(1600, range(100))
    holds, other = replica("holds", hit_pages=100), replica("other")
    assert router("seconds").choose(request, [holds, other]) == RouteChoice("holds", "pages")
    busy = holds._replace(backlog_tokens=1600 * 2)
    assert router("seconds").choose(request, [busy, other]) == RouteChoice("other", "load")


def test_a_slow_replica_gets_less() -> None:
    views = [
        replica("fast"),
        replica("slow", prefill_s_per_token=8e-4, step_s_by_rows=tuple(4 * s for s in STEPS)),
    ]
    got = sent(router("seconds"), views, [RequestView(400, [i]) for i in range(60)], end=6)
    assert got["fast"] > 2 * got["slow"]


def test_reasons_are_told() -> None:
    request = RequestView(160, range(10))
    assert router("least").choose(request, [replica("a", alive=False), replica("b")]) == RouteChoice("b", "only")
    two = [replica("a", open_rows=1), replica("b", hit_pages=10)]
    assert router("round-robin").choose(request, two) == RouteChoice("a", "turn")
    assert router("least").choose(request, two) == RouteChoice("b", "load")
    assert router("seconds").choose(request, two) == RouteChoice("b", "pages")


def test_prefix_follows_a_tenth_of_the_prompt_only() -> None:
    for hit_pages, name in ((9, "idle"), (10, "holds")):
        views = [replica("holds", open_rows=5, hit_pages=hit_pages), replica("idle")]
        assert router("prefix").choose(RequestView(1600, range(100)), views).replica == name


def test_pages_are_common_while_more_have_them_than_a_replica_s_share() -> None:
    common = CommonPages()
    for n in range(40):
        common.count(["system", n], 4)
    assert common.count(["system", "x"], 4) == 1
    for n in range(2 * COUNTED_REQUESTS):
        common.count([f"new{n}"], 4)
    assert common.count(["system", "x"], 4) == 0, "two generations later it is forgotten"


def test_prompts_that_are_alike_as_far_as_is_counted_are_common_to_the_end() -> None:
    common, long = CommonPages(), list(range(2 * COUNTED_PAGES))
    found = [common.count(long, 2) for _ in range(5)]
    assert found[0] == 0
    assert found[-1] == len(long)


def test_a_row_beyond_the_table_waits_for_another() -> None:
    assert decoding_s(0, ()) == (0.0, 0.0)
    assert decoding_s(0, STEPS) == (0.010, 0.0)
    now, slower = decoding_s(3, STEPS)
    assert (now, slower) == (0.016, pytest.approx(0.004))
    waits, slower = decoding_s(4, STEPS)
    assert (waits, slower) == (pytest.approx(0.020), pytest.approx(0.004))
    assert decoding_s(7, STEPS)[0] == pytest.approx(2 * STEPS[-1])


def test_an_unknown_route_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="seconds, prefix, least, round-robin"):
        policy_named("fastest")
