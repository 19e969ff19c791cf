"""The law `typical` as clients see it: asked for by a request or by the server, and said in every response."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve.conftest import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Server

BODY = {"prompt": "the cat in the hat", "max_tokens": 120, "temperature": 0.9, "seed": 5, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "the cat in the hat"}], "max_tokens": 40, "seed": 5}
ASKED = {"speculation": {"law": "typical", "budget": 0.2}}


@pytest.fixture(scope="module")
def typical(model: Path) -> Iterator[httpx.Client]:
    with running(model, "--law", "typical", "--law-budget", "0.1", "--rl") as server, server.client() as client:
        yield client


def post(http: httpx.Client, body: dict[str, Any], route: str = "completions") -> httpx.Response:
    response = http.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    return response


def told(usage: dict[str, Any]) -> tuple[str, float, int, float]:
    spoken = usage["speculation"]
    return spoken["law"], spoken["budget"], spoken["changed_tokens"], spoken["changed_nats"]


def test_a_request_asks_for_the_law(http: httpx.Client, server: Server) -> None:
    before = server.metric("paceline_changed_tokens_total")
    plain, changed = post(http, BODY), post(http, BODY | ASKED | {"n": 3})
    assert "x-paceline-law" not in plain.headers
    assert "law" not in plain.json()["usage"]["speculation"]
    assert changed.headers["x-paceline-law"] == "typical 0.2"
    law, budget, num_changed, nats = told(changed.json()["usage"])
    assert (law, budget) == ("typical", 0.2)
    assert 0 < num_changed <= 3 * 24
    assert nats >= 0
    assert changed.json()["choices"][0]["text"] != plain.json()["choices"][0]["text"]
    assert server.metric("paceline_changed_tokens_total") == before + num_changed


def test_no_budget_is_no_change(http: httpx.Client) -> None:
    plain, same = (
        post(http, BODY).json(),
        post(http, BODY | {"speculation": {"law": "typical", "budget": 0}}).json(),
    )
    assert same["choices"][0]["text"] == plain["choices"][0]["text"]
    assert told(same["usage"]) == ("typical", 0.0, 0, 0.0)


def test_passes_tell_which_tokens_were_changed(http: httpx.Client) -> None:
    body = BODY | {"speculation": ASKED["speculation"] | {"details": True}}
    answer = post(http, body).json()
    passes = answer["choices"][0]["speculation"]["passes"]
    changed = [note["tokens"][place] for note in passes for place in note.get("changed", ())]
    assert len(changed) == answer["usage"]["speculation"]["changed_tokens"] > 0
    assert {token["from"] for token in changed} == {"ngram"}


def test_a_stream_names_the_law_before_its_first_token(http: httpx.Client) -> None:
    body = BODY | ASKED | {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["x-paceline-law"] == "typical 0.2"
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert told(json.loads(lines[-2])["usage"])[:2] == ("typical", 0.2)


@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
def test_a_stream_that_cannot_be_written_again_is_not_continued_by_its_last_event(
    typical: httpx.Client, route: str
) -> None:
    """What the client lacks would be the end of another text."""
    params = {"max_new_tokens": 20, "temperature": 0.9, "sampling_seed": 5}
    body = {
        "/v1/completions": BODY | {"stream": True},
        "/generate": {"text": "the cat in the hat", "sampling_params": params, "stream": True},
    }[route]
    with typical.stream("POST", route, json=body, headers={"accept": "text/event-stream"}) as response:
        assert response.status_code == 200
        assert not [line for line in response.iter_lines() if line.startswith("id:")]
    response = typical.post(route, json=body, headers={"last-event-id": "7"})
    assert response.status_code == 400
    assert "answer_ids" in response.text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "the cat in the hat", "max_output_tokens": 40}),
        ("/v1/chat/completions", CHAT),
    ],
)
def test_every_route_tells(http: httpx.Client, route: str, body: dict[str, Any]) -> None:
    response = http.post(route, json=body | ASKED)
    assert response.status_code == 200, response.text
    assert response.headers["x-paceline-law"] == "typical 0.2"
    assert told(response.json()["usage"])[:2] == ("typical", 0.2)


def test_roll_outs_tell(typical: httpx.Client) -> None:
    body = {"text": "the cat", "sampling_params": {"max_new_tokens": 20, "temperature": 0.9}} | ASKED
    response = typical.post("/generate", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-paceline-law"] == "typical 0.2"
    assert response.json()["meta_info"]["law"] == "typical"


def test_a_server_under_the_law_says_so_first(typical: httpx.Client) -> None:
    promise = typical.get("/v1/models").json()["data"][0]["promise"]
    assert promise["law"] == "typical 0.1"
    assert promise["text"].startswith("none of texts")
    answer = post(typical, BODY)
    assert answer.headers["x-paceline-law"] == "typical 0.1"
    law, budget, num_changed, _ = told(answer.json()["usage"])
    assert (law, budget) == ("typical", 0.1)
    assert num_changed <= 12
    own = post(typical, BODY | {"speculation": {"budget": 0.3}})
    assert own.headers["x-paceline-law"] == "typical 0.3"
    assert told(own.json()["usage"])[1] == 0.3


def test_a_request_may_leave_the_law(typical: httpx.Client, http: httpx.Client) -> None:
    """By asking for the other one, or with a grammar, whose masks are for the target's own choices."""
    for more in (
        {"speculation": {"law": "coupled"}},
        {"ignore_eos": False, "guided_regex": "[a-f]{5,20}"},
    ):
        answer, plain = post(typical, BODY | more), post(http, BODY | more)
        assert "x-paceline-law" not in answer.headers
        assert "law" not in answer.json()["usage"]["speculation"]
        assert answer.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("speculation", "match"),
    [
        ({"law": "typical"}, "needs speculation.budget"),
        ({"budget": 0.1}, "goes with the law typical"),
        ({"law": "typical", "budget": 0.6}, "between 0 and 0.5"),
        ({"law": "typical", "budget": -1}, "between 0 and 0.5"),
        ({"law": "rejection"}, "coupled or typical here"),
        ({"law": ""}, "name of a law"),
        ({"law": "typical", "budget": "much"}, "float"),
    ],
)
def test_what_does_not_fit_is_refused(http: httpx.Client, speculation: dict[str, Any], match: str) -> None:
    response = http.post("/v1/completions", json=BODY | {"speculation": speculation})
    assert response.status_code == 400
    error = response.json()["error"]
    assert match in error["message"]
    assert error["param"].startswith("speculation")
