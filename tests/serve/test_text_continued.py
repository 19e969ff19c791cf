"""Answers of a SentencePiece model: what continues a text keeps its first space, a turn of a chat has none."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from paceline import LLM, SamplingParams
from paceline.engine import wire
from paceline.model.files.gguf_tokenizer import tokenizer_from_gguf
from paceline.model.template import ChatTemplate
from paceline.model.template_source import TemplateSource
from paceline.model.tokenizer import Tokenizer
from paceline.serve.api.event_jobs import messages_job, responses_job
from paceline.serve.api.parse import Serving
from paceline.serve.api.tool_calls.scan import MarkerText
from paceline.serve.fleet.journal import Journal
from paceline.serve.prompts import Item, Prompts
from paceline.serve.terminal.generate import generate
from tests.model.test_tokenizer import PIECES, SENTENCE, piece_metadata
from tests.serve.conftest import TEMPLATE, running, write_model
from tests.serve.fleet.fake_engines import request_of
from tests.serve.fleet.test_journal import NO_ANSWERS
from tests.serve.test_continued import events, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx

    from paceline.serve.api.parse import Job

PROMPT = "ab c"
AB = PIECES.index("▁ab")
BIAS = {AB: 100.0}  # it is all that is written
BODY: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "logit_bias": {str(AB): 100}}
USER, BEGUN = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CONTINUES = {"messages": [USER, BEGUN], "continue_final_message": True}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("pieces"), vocab_size=len(PIECES))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 2, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer_from_gguf(piece_metadata()).to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def client(pieces: Path) -> Iterator[httpx.Client]:
    with running(pieces, "--rl") as server, server.client() as found:
        yield found


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def completed(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = post(client, "/v1/completions", **BODY | {"prompt": PROMPT} | body)["choices"]
    return found


def test_a_completion_goes_on_with_its_prompts_text(client: httpx.Client) -> None:
    (plain,) = completed(client, logprobs=0)
    assert plain["text"] == " ab ab ab"
    assert plain["logprobs"]["tokens"] == [" ab"] * 3
    assert plain["logprobs"]["text_offset"] == [0, 3, 6]
    for prompts in (["c", PROMPT], [SENTENCE.encode("c"), [AB]]):
        assert [c["text"] for c in completed(client, n=2, prompt=prompts)] == [" ab ab ab"] * 4
    assert completed(client, echo=True, prompt=["", PROMPT])[1]["text"] == PROMPT + " ab ab ab"
    assert completed(client, prompt="")[0]["text"] == "ab ab ab", "it begins a text"


def test_tokens_of_an_echo_stand_where_their_offsets_say(client: httpx.Client) -> None:
    for prompt in (PROMPT, ""):
        (found,) = completed(client, echo=True, logprobs=0, prompt=prompt)
        tokens, offsets = found["logprobs"]["tokens"], found["logprobs"]["text_offset"]
        assert offsets[:2] == [0, 0], "the first token is special, and the space of the second is not shown"
        tokens = ["", tokens[1].removeprefix(" "), *tokens[2:]]
        assert "".join(tokens) == found["text"]
        assert offsets == [len("".join(tokens[:k])) for k in range(len(tokens))]


def test_a_stop_string_may_begin_with_the_first_space(client: httpx.Client) -> None:
    (found,) = completed(client, stop=[" ab"])
    assert (found["text"], found["stop_reason"]) == ("", " ab")
    (found,) = completed(client, stop=[" ab ab"], include_stop_str_in_output=True)
    assert (found["text"], found["finish_reason"]) == (" ab ab", "stop")


@pytest.mark.parametrize(
    ("route", "body", "text"),
    [
        ("completions", {"prompt": PROMPT}, " ab ab ab"),
        ("completions", {"prompt": ""}, "ab ab ab"),
        ("chat/completions", CONTINUES, " ab ab ab"),
        ("chat/completions", {"messages": [USER]}, "ab ab ab"),
    ],
)
def test_an_answer_goes_on_with_the_text_that_it_began(
    client: httpx.Client, route: str, body: dict[str, Any], text: str
) -> None:
    body = BODY | body | {"seed": 1}
    found = events(client, body, route)
    assert texts(found) == [text]
    for place, (last, _) in enumerate(found[:-1]):
        begun = texts(found[: place + 1])[0]
        assert begun + texts(events(client, body, route, last))[0] == text
        told = body | {"answer_ids": [AB] * int(last)}
        assert begun + texts(events(client, told, route))[0] == text
        (choice,) = post(client, f"/v1/{route}", **told)["choices"]
        assert (choice["message"]["content"] if "message" in choice else choice["text"]) == text


def test_a_roll_out_and_its_rest_are_one_text(client: httpx.Client) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 3, "logit_bias": BODY["logit_bias"]}
    asked = {"text": PROMPT, "sampling_params": sampling}
    assert post(client, "/generate", **asked)["text"] == " ab ab ab"
    assert post(client, "/generate", **asked, answer_ids=[AB])["text"] == " ab ab"
    assert post(client, "/generate", **asked | {"text": ""})["text"] == "ab ab ab"


@pytest.mark.parametrize(
    ("make_job", "body", "within"),
    [
        (messages_job, {"max_tokens": 3, "messages": [USER, BEGUN]}, True),
        (messages_job, {"max_tokens": 3, "messages": [USER]}, False),
        (responses_job, {"input": "a"}, False),
    ],
)
def test_a_prefilled_message_is_continued(
    make_job: Callable[..., Job], body: dict[str, Any], within: bool
) -> None:
    serving = Serving(Prompts(SENTENCE, ChatTemplate(TemplateSource(TEMPLATE, {})), 512), ("tiny",))
    assert make_job(json.dumps(body).encode(), serving, 0.0).requests[0].within is within


@pytest.mark.parametrize("within", [False, True])
def test_every_replica_of_an_answer_is_told(within: bool) -> None:
    answer = Journal().begin(replace(request_of("r"), within=within), NO_ANSWERS)
    for number in range(2):
        message = wire.encode(wire.Submit.of(answer.continued(answer.begin_leg(str(number)))))
        assert msgspec.msgpack.decode(message, type=wire.Submit).request().within is within


@pytest.mark.parametrize("within", [False, True])
def test_markers_stand_where_the_text_has_them(within: bool) -> None:
    raw = tokenizer_from_gguf(piece_metadata())
    raw.add_special_tokens(["<mark>"])
    tokenizer, mark = Tokenizer(raw), raw.token_to_id("<mark>")
    text, ids = tokenizer.detokenizer(within=within), [AB, mark, AB]
    found = MarkerText(tokenizer, {mark: "<mark>"}, within).push(text.push(ids), ids)
    assert found == (" ab<mark> ab" if within else "ab<mark> ab")


def test_python_and_the_terminal_keep_it_too(pieces: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logit_bias=BIAS)
    with LLM(str(pieces), draft="off", threads=1, num_rows=2, max_len=256) as llm:
        for prompt, text in ((PROMPT, " ab ab ab"), (SENTENCE.encode("c"), " ab ab ab"), ("", "ab ab ab")):
            assert llm.generate(prompt, params)[0].text == text
            assert llm.generate(prompt, params, answer_ids=[AB])[0].text == text
            assert "".join(delta.text for delta in llm.stream(prompt, params)) == text
        assert llm.chat([USER], params).text == "ab ab ab"
        assert "".join(delta.text for delta in llm.stream([USER], params)) == "ab ab ab"
        assert llm.chat([USER, BEGUN], params, continue_final_message=True).text == " ab ab ab"
        for items, chat, line in (
            ([Item(1, "a")], False, " ab ab ab\n"),
            ([Item(1, "a")], True, "ab ab ab\n"),
            ([Item(1, "a"), Item(2, messages=(USER,))], False, " ab ab ab\nab ab ab\n"),
        ):
            sink = io.StringIO()
            generate(llm, items, params, chat=chat, as_json=False, sink=sink)
            assert sink.getvalue() == line
