"""Log-probabilities of prompts: the model's own, whatever the chunks, the batch, the cache and preemption."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backend.prompt_scores import ScoringPass
from paceline.backend.seam import Packed, PassResult
from paceline.core.errors import RequestError
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.core.sampling import logprobs
from tests.engine.same_text import (
    PLAIN,
    Settings,
    assert_same,
    make_engine,
    plain_answers,
    prompts,
    run,
    settings_,
    target,
)

if TYPE_CHECKING:
    from paceline.backend.reference.decoder import ReferenceDecoder
    from paceline.core.request_nouns import TokenLogprobs


def scored(name: str, prompt: tuple[int, ...], num_top: int | None, max_tokens: int = 0) -> Request:
    params = SamplingParams(prompt_logprobs=num_top, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(name, prompt, params, seed=0)


def expected(prompt: tuple[int, ...], num_top: int) -> list[TokenLogprobs]:
    """What one pass over the whole prompt says."""
    decoder: ReferenceDecoder = target().decoder  # type: ignore[assignment]
    places, num_pages = np.arange(len(prompt)), -(-len(prompt) // 16)
    offsets, pages = np.array([0, len(prompt)]), np.arange(num_pages)[None]
    packed = Packed(np.array(prompt), places, places, offsets, pages, places)
    hidden, _ = decoder.forward(packed, decoder.new_kv(num_pages))
    rows = decoder.logits(hidden).numpy()
    return [logprobs(row, token, num_top) for row, token in zip(rows, prompt[1:], strict=False)]


def assert_close(got: tuple[TokenLogprobs, ...] | None, wanted: list[TokenLogprobs]) -> None:
    assert got is not None
    assert [g.token_id for g in got] == [w.token_id for w in wanted]
    assert [g.top_ids for g in got] == [w.top_ids for w in wanted]
    assert np.allclose([g.logprob for g in got], [w.logprob for w in wanted], atol=1e-9)


@given(
    asked=st.lists(
        st.tuples(prompts(), st.sampled_from([None, 0, 3]), st.sampled_from([0, 1, 9])), min_size=1, max_size=6
    ),
    changed=settings_(),
    stagger=st.sampled_from([0, 1, 3]),
    draft=st.sampled_from(["off", "ngram:k=4", "suffix:k=8"]),
)
def test_prompts_are_scored_as_the_model_scores_them(
    asked: list[tuple[tuple[int, ...], int | None, int]], changed: Settings, stagger: int, draft: str
) -> None:
    requests = [scored(str(i), *one) for i, one in enumerate(asked)]
    answers = run(make_engine(draft, changed), requests, stagger)
    for request, (prompt, num_top, max_tokens) in zip(requests, asked, strict=True):
        answer = answers[request.request_id]
        assert answer.ending[0] == "length"
        assert len(answer.token_ids) == max_tokens
        if num_top is None:
            assert answer.prompt_logprobs is None
        else:
            assert_close(answer.prompt_logprobs, expected(prompt, num_top))
    assert_same(answers, plain_answers(requests))


@pytest.mark.parametrize("types", ["f32", "int8", "int4"])
def test_native_scores_have_the_same_bits_in_any_batch(types: str) -> None:
    requests = [scored(str(i), tuple(range(40 + i, 75 + 2 * i)), 2, i % 3) for i in range(6)]
    alone = {r.request_id: plain_answers([r], types)[r.request_id] for r in requests}
    for changed in (PLAIN, Settings(num_rows=3, prefill_tokens=7, prefix_cache=True), Settings(num_pages=12)):
        together = run(make_engine("ngram:k=4", changed, types=types), requests)
        for name, answer in alone.items():
            assert together[name].prompt_logprobs == answer.prompt_logprobs


def test_a_cached_prompt_is_scored_again() -> None:
    engine = make_engine("off", replace(PLAIN, prefix_cache=True))
    prompt = tuple(range(40, 90))
    first = run(engine, [scored("a", prompt, 1)])["a"]
    assert run(engine, [scored("b", prompt, None, 2)])["b"].prompt_logprobs is None
    assert engine.stats().cached_tokens == 48, "pages of a scored prompt serve others"
    assert run(engine, [scored("c", prompt, 1)])["c"].prompt_logprobs == first.prompt_logprobs


def test_few_positions_are_scored_in_a_step() -> None:
    """A scored token counts as four prefilled tokens, so that a step keeps few logits."""
    engine = make_engine("off", replace(PLAIN, prefill_tokens=32))
    engine.add(scored("a", tuple(range(40, 90)), 1))
    engine.step()
    assert engine.scheduler.requests["a"].computed_len == 8


def test_a_late_target_refuses_to_score() -> None:
    engine = make_engine("off", PLAIN, types="cuda")
    with pytest.raises(RequestError, match="does not score prompts"):
        engine.add(scored("a", (40, 41), 1))
    assert run(engine, [scored("b", (40, 41), None)])["b"].token_ids == []


def test_an_answer_of_no_token_ends_at_its_first() -> None:

    answer = run(make_engine("off", PLAIN), [scored("a", (40,), 2)])["a"]
    assert (answer.prompt_logprobs, answer.text, answer.ending[0]) == ((), "", "length")


def test_experts_are_counted_in_a_pass_that_scores() -> None:
    spec = SamplingSpec("argmax", SamplingParams())
    whole = PassResult(np.array([3, 4]), touched=(5.0, 2.0))
    judged, _ = ScoringPass([], [1], [spec], [spec, spec]).split(whole)
    assert (judged.token_ids.tolist(), judged.touched) == ([4], (5.0, 2.0))
