"""Frameworks over the OpenAI client: langchain, instructor, pydantic-ai, litellm. Those that are installed."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from tests.serve.conftest import Server


pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


class Point(BaseModel):
    """A point."""

    model_config = ConfigDict(extra="forbid")
    x: bool
    y: bool


# langchain-openai ------------------------------------------------------------------------------------


def langchain(server: Server, **more: Any) -> Any:
    module = pytest.importorskip("langchain_openai")
    given = {"model": "default", "max_tokens": 60, "seed": 3} | more
    return module.ChatOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, **given)


def test_langchain_chats_and_streams(server: Server) -> None:
    model = langchain(server)
    assert model.invoke("the").content == "".join(piece.content for piece in model.stream("the"))


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gives_structured_output(server: Server, method: str) -> None:
    model = langchain(server, temperature=0)
    if method == "json_mode":
        assert isinstance(model.with_structured_output(None, method=method).invoke("say JSON"), dict)
    else:
        assert isinstance(model.with_structured_output(Point, method=method).invoke("say"), Point)


def test_langchain_binds_tools(server: Server) -> None:
    model = langchain(server, max_tokens=200).bind_tools([Point], tool_choice="any")
    assert model.invoke("say").tool_calls[0]["name"] == "Point"


def test_langchain_uses_responses(server: Server) -> None:
    assert langchain(server, use_responses_api=True, seed=None).invoke("the").content is not None


# instructor ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor(server: Server, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    plain = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
    asked = {"model": "default", "messages": [{"role": "user", "content": "say"}], "max_tokens": 200}
    if mode == "JSON":  # any object: the client asks again until it is a point, which chance decides
        with pytest.raises(Exception, match=r"Point|incomplete"):
            client.chat.completions.create(response_model=Point, max_retries=0, **asked)
    else:
        assert isinstance(client.chat.completions.create(response_model=Point, max_retries=0, **asked), Point)


# pydantic-ai -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "ToolOutput", "NativeOutput"])
def test_pydantic_ai(server: Server, kind: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="x")
    model = models.OpenAIChatModel("default", provider=provider)
    output = str if kind == "text" else getattr(ai, kind)(Point)
    agent = ai.Agent(model, output_type=output, model_settings={"max_tokens": 200, "seed": 3}, retries=1)
    found = asyncio.run(agent.run("the")).output
    assert isinstance(found, str if kind == "text" else Point)


# litellm ---------------------------------------------------------------------------------------------


def test_litellm(server: Server) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a table of prices
    litellm = pytest.importorskip("litellm")
    where = {"api_base": f"{server.url}/v1", "api_key": "x"}
    message = [{"role": "user", "content": "the"}]
    for provider in ("openai", "hosted_vllm"):
        asked: dict[str, Any] = {"model": f"{provider}/default", "messages": message, "max_tokens": 8} | where
        whole = litellm.completion(**asked, seed=3).choices[0].message.content
        pieces = [p.choices[0].delta.content or "" for p in litellm.completion(**asked, seed=3, stream=True)]
        assert "".join(pieces) == whole
    named = {"model": "anthropic/default", "api_base": server.url, "api_key": "x", "max_tokens": 8}
    assert litellm.completion(messages=message, **named).choices
