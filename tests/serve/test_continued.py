"""An answer goes on over HTTP: by the tokens told so far, or by the id of the last event."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Outcome, Request, TokenLogprobs
from paceline.serve.api.continuation import SentPart
from tests.serve.conftest import running
from tests.serve.test_tools import NOW, WEATHER, chatty
from tests.tiny import tiny_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from tests.serve.conftest import Server

__all__ = ["chatty"]  # a fixture

PROMPT = "the cat in the hat"
USER = [{"role": "user", "content": PROMPT}]
WARM = {"seed": 5, "temperature": 0.9, "max_tokens": 40, "return_token_ids": True}
KINDS: dict[str, dict[str, Any]] = {
    "warm": {"top_p": 0.9},
    "greedy": {"temperature": 0.0, "frequency_penalty": 0.5, "min_tokens": 8},
    "scored": {"logprobs": 2, "repetition_penalty": 1.2},
    "many": {"n": 3, "presence_penalty": 0.4},
    "fixed form": {"guided_regex": "[a-z ]{20,60}"},
}


def post(http: httpx.Client, body: dict[str, Any], route: str) -> dict[str, Any]:
    response = http.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def bodies(kind: str) -> list[tuple[str, dict[str, Any]]]:
    more = dict(KINDS[kind])
    chat = {**more, "logprobs": True, "top_logprobs": 2} if "logprobs" in more else more
    return [
        ("completions", WARM | more | {"prompt": PROMPT}),
        ("chat/completions", WARM | chat | {"messages": USER}),
    ]


def events(
    http: httpx.Client, body: dict[str, Any], route: str, last: str = ""
) -> list[tuple[str, dict[str, Any]]]:
    """The ids and bodies of a stream's events."""
    headers = {"last-event-id": last} if last else {"accept": "text/event-stream"}
    with http.stream("POST", f"/v1/{route}", json=body | {"stream": True}, headers=headers) as response:
        assert response.status_code == 200, response.read()
        blocks = "\n".join(response.iter_lines()).split("\n\n")
    assert blocks[-1].strip() == "data: [DONE]" or blocks[-2].strip() == "data: [DONE]"
    pairs = [block.strip().split("\n") for block in blocks if block.strip() not in ("", "data: [DONE]")]
    assert all(i.startswith("id: ") and d.startswith("data: ") for i, d in pairs)
    return [(i.removeprefix("id: "), json.loads(d.removeprefix("data: "))) for i, d in pairs]


def texts(found: list[tuple[str, dict[str, Any]]], n: int = 1) -> list[str]:
    """Each choice's text, put together as a client does."""
    whole = [""] * n
    for _, body in found:
        for choice in body["choices"]:
            whole[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return whole


def told(choices: list[dict[str, Any]], share: float) -> list[list[int]]:
    """The first tokens of each answer, never all of them."""
    return [c["token_ids"][: int(share * len(c["token_ids"]))] for c in choices]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_behind_its_tokens(http: httpx.Client, kind: str) -> None:
    for route, body in bodies(kind):
        whole = post(http, body, route)
        choices = whole["choices"]
        for share in (0.0, 0.3, 0.99):
            ids = told(choices, share)
            asked = body | {"answer_ids": ids if len(ids) > 1 else ids[0]}
            again = post(http, asked, route)
            for new, old, begun in zip(again["choices"], choices, ids, strict=True):
                scores, expected = new.pop("logprobs"), dict(old)
                known = expected.pop("logprobs")
                assert new == expected
                if known is not None and route == "completions":
                    assert scores == {name: values[len(begun) :] for name, values in known.items()}
                elif known is not None:
                    assert scores["content"] == known["content"][len(begun) :]
            for name in ("prompt_tokens", "completion_tokens"):
                assert again["usage"][name] == whole["usage"][name]
            assert again["system_fingerprint"] == whole["system_fingerprint"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_behind_any_of_its_events(http: httpx.Client, kind: str) -> None:
    for route, body in bodies(kind):
        n = body.get("n", 1)
        found = events(http, body, route)
        choices = post(http, body, route)["choices"]
        assert found[-1][0] == ",".join(str(len(c["token_ids"])) for c in choices)
        for place in {0, len(found) // 3, len(found) - 2, len(found) - 1}:
            last = found[place][0]
            rest = events(http, body, route, last)
            begun, missing, whole = texts(found[: place + 1], n), texts(rest, n), texts(found, n)
            assert [a + b for a, b in zip(begun, missing, strict=True)] == whole
            if n == 1:
                assert "role" not in rest[0][1]["choices"][0].get("delta", {})
            assert rest[-1][0] == found[-1][0]
            ends = {c["index"]: c["finish_reason"] for _, b in rest for c in b["choices"] if c["finish_reason"]}
            assert ends == {c["index"]: c["finish_reason"] for c in choices}
            if n == 1 and place < len(found) - 1:
                asked = body | {"answer_ids": choices[0]["token_ids"][: int(last)]}
                assert texts(events(http, asked, route)) == texts(rest)
                further = int(last) + 1
                if further < len(choices[0]["token_ids"]):
                    part = events(http, asked, route, str(further))
                    assert "".join(texts(found)).endswith(texts(part)[0])


def test_a_plain_stream_has_no_ids(http: httpx.Client) -> None:
    """Many clients read each line as data."""
    with http.stream("POST", "/v1/completions", json=WARM | {"prompt": PROMPT, "stream": True}) as response:
        assert all(line.startswith("data: ") for line in response.iter_lines() if line)


def test_the_key_is_told(http: httpx.Client) -> None:
    promise = http.get("/v1/models").json()["data"][0]["promise"]
    assert len(promise["key"]) == 64
    done = post(http, WARM | {"prompt": PROMPT}, "completions")
    assert done["system_fingerprint"] == f"fp_{promise['key'][:16]}"


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"answer_ids": [5, [6]]}, "answer_ids must be a list of token ids"),
        ({"answer_ids": [[5], [6]]}, "answer_ids must be a list of token ids"),
        ({"answer_ids": [5], "n": 2}, "answer_ids must be 2 lists"),
        ({"answer_ids": [[5]], "n": 2}, "answer_ids must be 2 lists"),
        ({"answer_ids": [-1]}, "answer_ids"),
        ({"answer_ids": [1 << 40]}, "answer_ids"),
        ({"answer_ids": [100000]}, "outside the vocabulary"),
        ({"answer_ids": ["a"]}, "answer_ids"),
        ({"answer_ids": [5] * 40}, "has ended"),
        ({"answer_ids": [5] * 41}, "max_tokens"),
        ({"answer_ids": [5, 6], "stop_token_ids": [6]}, "has ended"),
        ({"answer_ids": [5], "guided_regex": "[0-9]+"}, "does not fit"),
        ({"answer_ids": [5], "prompt_logprobs": 1}, "leave out prompt_logprobs"),
        ({"answer_ids": [5], "echo": True, "logprobs": 1}, "leave out prompt_logprobs"),
    ],
)
def test_an_answer_that_cannot_go_on_is_refused(http: httpx.Client, more: dict[str, Any], match: str) -> None:
    response = http.post("/v1/completions", json=WARM | {"prompt": PROMPT} | more)
    assert response.status_code == 400, response.text
    assert match in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("last", "more", "match"),
    [
        ("x", {}, "last-event-id must be an id"),
        ("-1", {}, "last-event-id must be an id"),
        ("1,2", {}, "last-event-id must be an id"),
        ("12345678", {}, "last-event-id must be an id"),
        ("3", {"n": 2}, "2 numbers of tokens"),
        ("3", {"seed": None}, "needs the seed"),
        ("3", {"answer_ids": [5, 5, 5, 5]}, "counts the whole answer"),
    ],
)
def test_an_id_of_no_event_is_refused(http: httpx.Client, last: str, more: dict[str, Any], match: str) -> None:
    body = WARM | {"prompt": PROMPT, "stream": True} | more
    response = http.post("/v1/completions", json=body, headers={"last-event-id": last})
    assert response.status_code == 400, response.text
    assert match in response.json()["error"]["message"]


def test_resumed_answers_are_counted(http: httpx.Client, server: Server) -> None:
    before = server.metric("paceline_resumed_tokens_total")
    ids = post(http, WARM | {"prompt": PROMPT}, "completions")["choices"][0]["token_ids"][:7]
    post(http, WARM | {"prompt": PROMPT, "answer_ids": ids}, "completions")
    assert server.metric("paceline_resumed_tokens_total") == before + 7


def test_a_client_goes_on_where_its_server_was_killed(model: Path, server: Server, http: httpx.Client) -> None:
    """On a server with another drafter; it must only have the same key."""
    body = WARM | {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True}
    headers = {"accept": "text/event-stream"}
    lines: list[str] = []
    with running(model, "--draft", "off") as other, other.client() as client:
        keys = {c.get("/v1/models").json()["data"][0]["promise"]["key"] for c in (client, http)}
        assert len(keys) == 1
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 60:
                    other.process.kill()
                    break
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    last = [line for line in lines if line.startswith("id: ")][len(data) - 1].removeprefix("id: ")
    begun = "".join(d["choices"][0]["text"] for d in data)
    ids = [i for d in data for i in d["choices"][0]["token_ids"]]
    assert len(ids) == int(last)
    whole = post(http, body, "completions")["choices"][0]["text"]
    assert begun + texts(events(http, body, "completions", last))[0] == whole
    assert begun + texts(events(http, body | {"answer_ids": ids}, "completions"))[0] == whole


# Parts that a client has -----------------------------------------------------------------------------


def test_any_outcomes_are_cut_at_any_count() -> None:
    """However drafts cut an answer into outcomes, a client that has n tokens gets the same rest."""
    tokenizer = tiny_tokenizer()
    ids = (70, 200, 9, 100, 195, 169, 71, 9, 33, 44)
    params = SamplingParams(max_tokens=len(ids), stop=("never written",))
    request = Request("r", (1,), params, seed=1)
    detokenizer = tokenizer.detokenizer()
    released = [detokenizer.push((i,)) for i in ids]
    released[-1] += detokenizer.flush()
    for size in (1, 2, 3, 10):
        outcomes = [
            Outcome(
                "r",
                ids[at : at + size],
                "".join(released[at : at + size]),
                tuple(TokenLogprobs(i, -1.0) for i in ids[at : at + size]),
                finish_reason="length" if at + size >= len(ids) else None,
                start=at,
            )
            for at in range(0, len(ids), size)
        ]
        for count in range(len(ids) + 2):
            part = SentPart(request, tokenizer, count, "")
            pairs = [part.split(outcome) for outcome in outcomes]
            has = [known for known, _ in pairs if known is not None]
            lacks = [new for _, new in pairs if new is not None]
            for outs, first, last in ((has, 0, count), (lacks, count, len(ids))):
                assert tuple(i for o in outs for i in o.token_ids) == ids[first:last]
                assert "".join(o.text for o in outs) == "".join(released[first:last])
                assert [s.token_id for o in outs for s in o.logprobs or ()] == list(ids[first:last])
            assert all(o.finish_reason is None for o in has)
            assert lacks[-1].finish_reason == "length"
            assert sum(o.finish_reason is not None for o in lacks) == 1


# Parts of a message ----------------------------------------------------------------------------------


def message_of(found: list[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """Reasoning, content, and names and arguments of calls, put together as clients do."""
    parts: dict[str, str] = {}
    for _, body in found:
        delta = body["choices"][0]["delta"]
        pieces = {"content": delta.get("content"), "reasoning": delta.get("reasoning")}
        for call in delta.get("tool_calls", ()):
            pieces[f"name {call['index']}"] = call["function"].get("name")
            pieces[f"arguments {call['index']}"] = call["function"]["arguments"]
        parts |= {name: parts.get(name, "") + piece for name, piece in pieces.items() if piece}
    return parts


@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {"temperature": 0.0}])
def test_a_message_goes_on_in_the_middle_of_its_parts(chatty: Server, more: dict[str, Any]) -> None:
    """Also in a call's arguments."""
    body = WARM | {"messages": USER, "max_tokens": 300, "tools": [WEATHER, NOW], **more}
    with chatty.client() as http:
        found = events(http, body, "chat/completions")
        whole = message_of(found)
        assert ("arguments 0" in whole) == ("tool_choice" in more)
        ids = [i for _, event in found for i in event["choices"][0].get("token_ids", ())]
        for place in range(0, len(found) - 1, max(1, len(found) // 12)):
            last = found[place][0]
            begun = message_of(found[: place + 1])
            for rest in (
                events(http, body, "chat/completions", last),
                events(http, body | {"answer_ids": ids[: int(last)]}, "chat/completions"),
            ):
                new = message_of(rest)
                assert {k: begun.get(k, "") + new.get(k, "") for k in {*begun, *new}} == whole
        message = post(http, body | {"answer_ids": ids[:9]}, "chat/completions")["choices"][0]["message"]
        assert (message.get("reasoning") or "") == whole.get("reasoning", "")
        assert (message["content"] or "") == whole.get("content", "")
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        assert [c["arguments"] for c in calls] == [v for k, v in whole.items() if k.startswith("arguments")]
