"""From texts and conversations to token ids: what is refused before it costs anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from paceline.core.errors import PromptTooLong, RequestError
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.params import MAX_SEED, SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.engine import check_room
from paceline.engine.pages import PagePool
from paceline.engine.request_table import Limits
from paceline.engine.scheduler import Scheduler
from paceline.model.template import ChatTemplate
from paceline.model.template_source import TemplateSource
from paceline.model.tokenizer import Tokenizer
from paceline.serve.api.generate_format import generate_job
from paceline.serve.api.parse import Serving, completion_job
from paceline.serve.api.schema import MAX_PROMPTS
from paceline.serve.prompts import Prompts, seed_of
from tests.serve.conftest import TEMPLATE
from tests.tiny import tiny_raw_tokenizer, tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.serve.api.parse import Job

MAX_LEN = 16


class Unused(Tokenizer):
    """A tokenizer that must not be used."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        raise AssertionError("this text is too long to be tokenised")


def test_a_text_that_must_be_too_long_is_not_tokenised() -> None:
    prompts = Prompts(Unused(tiny_raw_tokenizer()), ChatTemplate(TemplateSource(TEMPLATE, {})), MAX_LEN)
    text = "a" * 1000
    with pytest.raises(PromptTooLong, match="at least 125 tokens") as told:
        prompts.of_text(text)
    assert told.value.param == "prompt"
    with pytest.raises(PromptTooLong, match="at least") as told:
        prompts.of_messages([{"role": "user", "content": text}])
    assert told.value.param == "messages"


def test_an_answer_that_does_not_fit_is_refused_in_the_same_words_by_server_and_engine() -> None:
    ids, params, pool = (1,) * 10, SamplingParams(max_tokens=8), PagePool(MAX_LEN // PAGE_TOKENS)
    with pytest.raises(PromptTooLong, match="10 tokens") as by_server:
        Prompts(tiny_tokenizer(), None, MAX_LEN).check_room(ids, params.max_tokens)
    with pytest.raises(PromptTooLong) as by_engine:
        check_room(Scheduler(Limits(num_rows=1), pool), Request("a", ids, params, seed=0))
    assert str(by_server.value) == str(by_engine.value)
    assert by_server.value.param == by_engine.value.param == "max_tokens"


def test_a_drawn_seed_survives_doubles_and_an_asked_one_is_kept() -> None:
    drawn = {seed_of(SamplingParams()) for _ in range(200)}
    assert len(drawn) > 190
    assert all(0 <= seed == int(float(seed)) < 1 << 53 for seed in drawn)
    assert seed_of(SamplingParams(seed=MAX_SEED)) == MAX_SEED


@pytest.mark.parametrize(
    ("make_job", "fields"),
    [
        (completion_job, lambda prompts, seed: {"prompt": prompts, "seed": seed}),
        (generate_job, lambda prompts, seed: {"input_ids": prompts, "sampling_params": {"sampling_seed": seed}}),
    ],
)
def test_a_prompt_that_is_sent_several_times_has_a_seed_each_time(
    make_job: Callable[..., Job], fields: Callable[..., dict[str, Any]]
) -> None:
    serving = Serving(Prompts(tiny_tokenizer(), None, MAX_LEN, 320), ("tiny",))

    def job(count: int, seed: int | None) -> Job:
        return make_job(json.dumps(fields([[65]] * count, seed)).encode(), serving, 0.0)

    drawn = job(MAX_PROMPTS, None)
    seeds = [request.seed for request in drawn.requests]
    assert len({*seeds}) == MAX_PROMPTS
    assert all(0 <= seed < 1 << 53 for seed in seeds)
    assert seeds == [request.seed for request in job(MAX_PROMPTS, drawn.meta.seed).requests], "all follow from one"
    assert [request.seed for request in job(2, 7).requests] == [7, 5566755282872662], "as the guide says"
    assert job(1, MAX_SEED).requests[0].seed == MAX_SEED


def test_a_prompt_has_the_text_that_it_has_alone_whatever_is_beside_it() -> None:
    serving = Serving(Prompts(tiny_tokenizer(), None, MAX_LEN, 320), ("tiny",))
    body = json.dumps({"prompt": [[65], [66], [65], [67], [66]], "seed": 7}).encode()
    seeds = [request.seed for request in completion_job(body, serving, 0.0).requests]
    assert seeds == [7, 7, 5566755282872662, 7, 5566755282872662]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"prompt": [[65], [320]]}', "vocabulary of 320"),
        (b'{"prompt": ["a", "aaaaaaaa"], "max_tokens": 9}', "shorten either"),
    ],
)
def test_a_bad_prompt_among_several_is_found_before_the_engine_has_any(body: bytes, what: str) -> None:
    prompts = Prompts(tiny_tokenizer(), None, MAX_LEN, 320)
    with pytest.raises(RequestError, match=what):
        completion_job(body, Serving(prompts, ("tiny",)), 0.0)
    good = b'{"prompt": [[65], [319]], "max_tokens": 15}'
    assert len(completion_job(good, Serving(prompts, ("tiny",)), 0.0).requests) == 2


def chat_prompts() -> Prompts:
    return Prompts(tiny_tokenizer(), ChatTemplate(TemplateSource(TEMPLATE, {})), 512)


def test_parts_of_a_content_are_one_text() -> None:
    parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": " in"}]
    system = {"role": "system", "content": "be kind"}
    found = chat_prompts().of_messages([system, {"role": "user", "content": parts}])
    assert found == chat_prompts().of_messages([system, {"role": "user", "content": "the cat in"}])


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "needs the field text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "needs the field text"),
        ({"role": "user", "content": ["hi"]}, "list of text parts"),
        ({"role": "user", "content": 5}, "list of text parts"),
        ({"role": "user", "content": {"type": "text", "text": "hi"}}, "list of text parts"),
        ("hi", "must be a mapping, not str"),
    ],
)
def test_other_contents_are_refused(message: Any, what: str) -> None:
    with pytest.raises(RequestError, match=what) as told:
        chat_prompts().of_messages([message])
    assert told.value.param == "messages"
