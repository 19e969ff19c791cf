"""What a request's client is told about its cost."""

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
