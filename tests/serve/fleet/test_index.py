"""The index of prompt pages, against its readable twin."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.prefix_cache import chain_hash, root_hash
from paceline.serve.fleet.index import PrefixIndex, page_hashes
from tests.oracles.prefix_index import SlowPrefixIndex
from tests.serve.fleet.fake_engines import request_of

replicas = st.sampled_from("abcd")


@st.composite
def prompts(draw: st.DrawFn) -> list[bytes]:
    """Page hashes of a prompt: a page's hash says what stands before it."""
    digits = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
    return [bytes(digits[: end + 1]) for end in range(len(digits))]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(replicas, st.none() | prompts(), st.integers(1, 8)), max_size=20), prompts())
def test_the_index_finds_what_its_twin_finds(
    doings: list[tuple[str, list[bytes] | None, int]], asked: list[bytes]
) -> None:
    fast, slow = PrefixIndex(), SlowPrefixIndex()
    for replica, hashes, num_pages in doings:
        for index in (fast, slow):
            if hashes is None:
                index.forget(replica)
            else:
                index.add(replica, hashes, num_pages)
        assert fast.hits(asked) == slow.hits(asked)
    assert set(fast._holders) == {page for pages in slow.pages.values() for page in pages}


def test_pages_are_hashed_as_an_engine_hashes_them() -> None:
    request = request_of("r", prompt=3 * PAGE_TOKENS + 5, salt="mine")
    expected, page = [], root_hash("", "mine")
    for start in range(0, 3 * PAGE_TOKENS, PAGE_TOKENS):
        page = chain_hash(page, request.prompt_ids[start : start + PAGE_TOKENS])
        expected += [page]
    assert page_hashes(request) == tuple(expected)
    assert len(page_hashes(request, told=range(PAGE_TOKENS - 5))) == 4
    assert page_hashes(request_of("r", prompt=3 * PAGE_TOKENS)) != tuple(expected)
