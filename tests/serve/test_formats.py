"""Format of responses: log-probabilities of /v1/completions, and what is told of promise keys."""

from __future__ import annotations

import codecs
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.figures import Figures
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Outcome, Request, TokenLogprobs
from paceline.engine.answer_queue import take_told
from paceline.engine.output import checker_of
from paceline.model.detokenizer import Detokenizer
from paceline.serve.api.generate_format import GenerateFormat
from paceline.serve.api.openai_format import CompletionFormat, PartialAnswer, usage
from tests.serve.fleet.fake_engines import request_of
from tests.tiny import END, tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENIZER = tiny_tokenizer()
CHARACTERS = st.text(st.sampled_from("a the\n\u00e9\u20ac\U0001f600"), max_size=12)
IDS = st.lists(CHARACTERS.map(TOKENIZER.encode) | st.lists(st.integers(0, 319), max_size=4), max_size=8)


def outcome(ids: Sequence[int]) -> Outcome:
    return Outcome("r", tuple(ids), "", tuple(TokenLogprobs(i, -1.0) for i in ids))


def streamed(steps: Sequence[Sequence[int]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The log-probabilities of a stream's chunks, and those of the whole answer."""
    form, answer = CompletionFormat(TOKENIZER, [request_of("r")]), PartialAnswer()
    chunks = []
    for ids in steps:
        chunks.append(form.delta(0, answer, outcome(ids))["logprobs"])
        answer.add(outcome(ids))
    return chunks, form.choice(0, answer)["logprobs"]


def offset_before(ids: Sequence[int]) -> int:
    """Characters that are whole before the next token."""
    data = b"".join(TOKENIZER.token_bytes(i) for i in ids if not TOKENIZER.is_special(i))
    return len(codecs.getincrementaldecoder("utf-8")("replace").decode(data))


def test_parts_of_a_character_stand_where_it_stands_and_special_tokens_take_no_room() -> None:
    end = TOKENIZER.encode(END)
    ids = [*TOKENIZER.encode("a\u20acb"), *end, *TOKENIZER.encode("c")]
    assert len(ids) == 7
    assert streamed([ids])[1]["text_offset"] == [0, 1, 1, 1, 2, 3, 3]


@given(steps=IDS.filter(bool))
def test_offsets_are_places_in_the_text_streamed_or_whole(steps: list[list[int]]) -> None:
    chunks, whole = streamed(steps)
    ids = [i for step in steps for i in step]
    assert whole["text_offset"] == [offset_before(ids[:k]) for k in range(len(ids))]
    for key, values in whole.items():
        assert [v for chunk in chunks for v in chunk[key]] == values


def test_every_token_of_a_stream_is_spelled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more for the whole answer: a stream that began anew with each chunk would grow with its square."""
    spelled: list[int] = []
    push = Detokenizer.push

    def counted(self: Detokenizer, ids: Sequence[int]) -> str:
        spelled.extend(ids)
        return push(self, ids)

    monkeypatch.setattr(Detokenizer, "push", counted)
    streamed([[65]] * 200)
    assert len(spelled) == 2 * 200


@pytest.mark.parametrize("inexact", [False, True])
def test_answers_of_two_promise_keys_say_so(inexact: bool) -> None:
    figures = Figures(3, 2, 0, 1, 1, 0, 0, 0, 5, inexact=inexact, weights=((0, "a"),))
    assert usage([figures], 1).get("resumed_inexact", False) == inexact
    roll_out = GenerateFormat(TOKENIZER, [request_of("r")], ["r"], scored=False, texts=False, skips=True)
    answer = PartialAnswer()
    answer.add(Outcome("r", (1, 2), "ab", finish_reason="length", figures=figures))
    about = roll_out.choice(0, answer)["meta_info"]
    assert about["weight_versions"] == [{"start": 0, "version": "a"}]
    assert about.get("resumed_inexact", False) == inexact


def rolled_out(ids: Sequence[int], told: Sequence[int] = (), **params: Any) -> list[str]:
    """The text that `/generate` tells after each token, special ones shown."""
    asked = SamplingParams(max_tokens=40, **params)
    request = Request("r", (65,), asked, seed=0, told=tuple(told), within=True)
    form = GenerateFormat(TOKENIZER, [request], ["r"], scored=False, texts=False, skips=False)
    checker, answer, found = checker_of(request, TOKENIZER), PartialAnswer(), []
    if told:
        take_told(checker, told)
    for token_id in ids:
        reason = checker.take_each([token_id])
        answer.add(Outcome("r", (token_id,), checker.text(), None, reason.finish_reason, reason.stop_reason))
        found.append(form.choice(0, answer)["text"])
    assert all(after.startswith(before) for before, after in pairwise(found)), "clients print what is new"
    return found


@pytest.mark.parametrize(
    ("text", "params", "shown"),
    [
        ("ab END", {"stop": "END"}, "ab "),
        ("ab END", {"stop": "END", "include_stop": True}, "ab END"),
        (f"E{END}ND", {"stop": "END", "ignore_eos": True}, ""),
        (f"ab{END}", {}, "ab"),
        (f"ab{END}", {"include_stop": True}, f"ab{END}"),
        (f"ab{END}", {"stop_token_ids": [319], "ignore_eos": True}, "ab"),
        ("abc", {"stop_token_ids": [TOKENIZER.encode("c")[0]]}, "ab"),
        (f"a{END}\u00e9b{END}", {"ignore_eos": True}, f"a{END}\u00e9b{END}"),
    ],
)
def test_a_roll_out_with_special_tokens_ends_where_its_stop_is(
    text: str, params: dict[str, Any], shown: str
) -> None:
    assert rolled_out(TOKENIZER.encode(text), **params)[-1] == shown


def test_parts_of_a_roll_out_with_special_tokens_are_its_text() -> None:
    ids = TOKENIZER.encode(f"{END}a{END}\u20acEN{END}D{END}b")
    whole = rolled_out(ids, ignore_eos=True, stop="EN D")
    assert "\ufffd" not in "".join(whole)
    for cut in range(1, len(ids)):
        assert whole[cut - 1] + rolled_out(ids[cut:], ids[:cut], ignore_eos=True, stop="EN D")[-1] == whole[-1]
