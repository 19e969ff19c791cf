"""What a client is told about the cost of its request."""

from __future__ import annotations

import pytest

from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Outcome, Request
from tests.engine.same_text import Settings, make_engine


@pytest.mark.parametrize("prefill_tokens", [1, 16, 32, 512])
@pytest.mark.parametrize(("draft", "passes"), [("off", 6), ("draft-model:model=same,k=2", 2)])
def test_what_counts_as_decoding_does_not_depend_on_how_the_prompt_was_computed(
    draft: str, passes: int, prefill_tokens: int
) -> None:
    """In one piece or in many, the last of one token alone, or from the prefix cache up to that token."""
    params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    engine = make_engine(draft, Settings(prefill_tokens=prefill_tokens, prefix_cache=True))
    for number in range(2):
        before, outcomes = engine.stats(), list[Outcome]()
        engine.add(Request(str(number), tuple(range(40, 73)), params, seed=1))
        while engine.has_work:
            outcomes += engine.step()
            engine.check()
        figures, gained = outcomes[-1].figures, engine.stats().since(before)
        assert figures is not None
        assert figures.cached_tokens == 32 * number
        assert (figures.decode_passes, figures.decoded_tokens) == (passes, 6)
        assert (gained.decode_passes, gained.decoded_tokens) == (passes, 6)
        assert gained.prefilled_tokens == 33 - 32 * number


@pytest.mark.parametrize("types", ["f64", "cuda"])
@pytest.mark.parametrize("draft", ["draft-model:model=same,k=5", "ngram:min=1,k=3"])
def test_the_engine_counts_what_its_answers_count(draft: str, types: str) -> None:
    """Also of passes in which an answer ended, and of those that ran when it had (`cuda` is a step late)."""
    engine, ends = make_engine(draft, Settings(), types=types), list[Outcome]()
    for number in range(16):
        params = SamplingParams(max_tokens=9 + number, stop_token_ids=tuple(range(number, 256, 16)))
        engine.add(Request(str(number), (40, 41, 40 + number), params, seed=number))
    while engine.has_work:
        ends += [o for o in engine.step() if o.finish_reason is not None]
        engine.check()
    stats, told = engine.stats(), [end.figures for end in ends if end.figures is not None]
    counts = stats.drafters.values()
    assert {end.finish_reason for end in ends} == {"stop", "length"}
    assert len(told) == 16
    assert (stats.decode_passes, stats.decoded_tokens, stats.output_tokens) == (
        sum(f.decode_passes for f in told),
        sum(f.decoded_tokens for f in told),
        sum(f.completion_tokens for f in told),
    )
    assert (sum(c.drafted for c in counts), sum(c.verified for c in counts), sum(c.accepted for c in counts)) == (
        sum(f.drafted_tokens for f in told),
        sum(f.verified_tokens for f in told),
        sum(f.accepted_tokens for f in told),
    )
    assert sum(stats.k_histogram) == stats.decode_passes
