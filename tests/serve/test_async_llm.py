"""`AsyncLLM`: many callers of one engine process, with the texts of `LLM`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.core.errors import ConfigError, EngineDied, ModelNotFound, RequestError
from paceline.core.params import Grammar
from paceline.core.request_nouns import Request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

OPTIONS: dict[str, Any] = {
    "draft": "ngram:k=4",
    "threads": 1,
    "num_rows": 4,
    "max_len": 8192,
    "max_queued_tokens": 64,
}
SHORT = SamplingParams(max_tokens=12, seed=4, temperature=0.9)
REFUSED_IDS: list[tuple[list[int], str]] = [
    ([-1], "outside the vocabulary"),
    ([1 << 40], "outside the vocabulary"),
    ([True], "must be token ids"),
    ([1] * (SHORT.max_tokens + 1), "counts the whole answer"),
]
LONG = SamplingParams(max_tokens=8000, seed=1, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


def run_over(model: Path, work: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    """Run work over an `AsyncLLM`, and check that nothing stays open."""

    async def run() -> None:
        async with AsyncLLM(str(model), **OPTIONS) as llm:
            await asyncio.wait_for(work(llm), 240)
            assert llm._client is not None
            assert llm._client.num_open == 0

    asyncio.run(run())


def test_many_callers_get_the_texts_of_llm(model: Path) -> None:
    prompts = [f"the cat {i}" for i in range(40)]  # more than the queue holds
    params = [replace(SHORT, seed=i, n=1 + i % 2, temperature=i % 3) for i in range(40)]
    with LLM(str(model), **OPTIONS) as llm:
        wanted = llm.generate(prompts, params)
        wanted_chat = llm.chat(HI, SHORT)
        assert llm.default_params == SamplingParams(temperature=0.7, top_p=0.95)

    async def work(llm: AsyncLLM) -> None:
        found = await asyncio.gather(*(llm.generate(p, q) for p, q in zip(prompts, params, strict=True)))
        for one, other in zip(found, wanted, strict=True):
            assert one.prompt_ids == other.prompt_ids
            assert [(a.text, a.token_ids, a.finish_reason) for a in one.choices] == [
                (a.text, a.token_ids, a.finish_reason) for a in other.choices
            ]
        assert (await llm.chat(HI, SHORT)).token_ids == wanted_chat.token_ids
        assert (await llm.generate(wanted[3].prompt_ids, params[3])).text == wanted[3].text
        assert llm.default_params == SamplingParams(temperature=0.7, top_p=0.95)
        assert len((await llm.chat(HI)).token_ids) > 0

    run_over(model, work)


def test_a_stream_is_the_whole_answer_in_pieces_and_closing_it_cancels(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        whole = await llm.generate("the cat", SHORT)
        pieces = [delta async for delta in llm.stream("the cat", SHORT)]
        assert "".join(d.text for d in pieces) == whole.text
        assert pieces[-1].figures is not None
        async with aclosing(llm.stream(HI, replace(LONG, n=2))) as stream:
            async for _ in stream:
                break
        task = asyncio.create_task(llm.generate("the cat", LONG))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await llm.generate("the cat", SHORT)).text == whole.text

    run_over(model, work)


def test_a_cut_answer_that_goes_on_is_the_whole(model: Path) -> None:
    two = replace(SHORT, n=2)

    async def work(llm: AsyncLLM) -> None:
        whole = await llm.generate("the cat", two)
        told = [answer.token_ids[:count] for answer, count in zip(whole.choices, (5, 0), strict=True)]
        again = await llm.generate("the cat", two, answer_ids=told)
        assert [a.token_ids for a in again.choices] == [a.token_ids for a in whole.choices]
        assert [a.text for a in again.choices] == [a.text for a in whole.choices]
        behind = [d async for d in llm.stream("the cat", SHORT, answer_ids=told[0])]
        assert told[0] + tuple(i for d in behind for i in d.token_ids) == whole.token_ids
        chat = await llm.chat(HI, SHORT)
        assert (await llm.chat(HI, SHORT, answer_ids=chat.token_ids[:3])).text == chat.text
        with pytest.raises(RequestError, match="ended"):
            await anext(llm.stream("the cat", SHORT, answer_ids=[1] * SHORT.max_tokens))
        for bad, why in REFUSED_IDS:
            with pytest.raises(RequestError, match=why):
                await anext(llm.stream("the cat", SHORT, answer_ids=bad))
        with pytest.raises(RequestError, match="must be a text or token ids"):
            await anext(llm.stream([True], SHORT))
        broken = Request("broken", (1, 1 << 40), SHORT, seed=0)
        answers = await llm._running.submit([broken])
        assert isinstance(error := await answers.next(), RequestError)
        assert "cannot read this request" in str(error)

    run_over(model, work)


def test_errors_are_those_of_llm(model: Path, tmp_path: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="empty"):
            await llm.generate("")
        with pytest.raises(RequestError, match="params must be"):
            await llm.generate("a", 5)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="shorten either"):
            await llm.generate("a", replace(SHORT, max_tokens=8192))

    run_over(model, work)
    with pytest.raises(ConfigError, match="did you mean 'draft'"):
        AsyncLLM(drafd="off")

    async def lost() -> None:
        async with AsyncLLM(str(tmp_path / "none")):
            pass

    with pytest.raises(ModelNotFound):
        asyncio.run(lost())
    with pytest.raises(EngineDied, match="async with"):
        asyncio.run(AsyncLLM(str(model)).generate("a"))


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_tools_and_structure_are_those_of_llm(model: Path) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "weather"}
    params = replace(SHORT, max_tokens=200, seed=3)
    formed = replace(params, grammar=Grammar.regex("(yes|no) [a-c]{3}"))
    with LLM(str(model), **OPTIONS) as llm:
        wanted = llm.chat(HI, params, **asked)
        answer = llm.chat(HI, formed)
    (call,) = wanted.choices[0].message.calls  # type: ignore[union-attr]
    assert call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert re.fullmatch("(yes|no) [a-c]{3}", answer.text)

    async def work(llm: AsyncLLM) -> None:
        assert (await llm.chat(HI, formed)).text == answer.text
        called = (await llm.chat(HI, params, **asked)).choices[0]
        assert called.text == wanted.text
        assert [c.arguments for c in called.message.calls] == [call.arguments]  # type: ignore[union-attr]
        with pytest.raises(RequestError, match="not among the tools"):
            await llm.chat(HI, params, tools=[WEATHER], tool_choice="x")
        with pytest.raises(RequestError):
            await llm.chat(HI, replace(params, grammar=Grammar.regex("(")))

    run_over(model, work)


def test_an_engine_that_dies_fails_open_calls_and_comes_back(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        before = await llm.generate("the cat", SHORT)
        task = asyncio.create_task(llm.generate("the cat", LONG))
        await asyncio.sleep(0.2)
        assert llm._client is not None
        assert llm._client.pid is not None
        os.kill(llm._client.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await task
        while llm._client.ready is None:
            await asyncio.sleep(0.1)
        assert (await llm.generate("the cat", SHORT)).text == before.text

    run_over(model, work)


def test_a_closed_llm_starts_again_and_a_running_one_does_not(model: Path) -> None:
    formed = replace(SHORT, max_tokens=200, grammar=Grammar.regex("(yes|no) [a-c]{3}"))

    async def run() -> None:
        llm = AsyncLLM(str(model), **OPTIONS)
        for _ in range(2):
            async with await llm.start() as same:
                assert same is llm
                commands = [" ".join(child.cmdline()) for child in psutil.Process().children()]
                assert sum("paceline.serve.worker.process" in command for command in commands) == 1
                assert (await llm.chat(HI, formed)).text[:2] in ("ye", "no")

    asyncio.run(asyncio.wait_for(run(), 240))
