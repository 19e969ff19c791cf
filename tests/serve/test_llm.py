"""The Python API and the commands over it, in this process."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace as with_fields

from paceline import LLM, SamplingParams
from paceline.cli import main
from paceline.core.errors import ConfigError, EngineDied, PromptTooLong, RequestError
from paceline.core.params import Grammar
from paceline.serve.terminal.banner import printable
from paceline.serve.terminal.chat_commands import obey
from paceline.serve.terminal.chat_session import Chat
from paceline.serve.terminal.line_input import LineInput
from paceline.serve.terminal.speakers import LocalSpeaker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.core.request_nouns import Outcome
    from paceline.serve.results import Completion

SHORT = SamplingParams(max_tokens=12, seed=4, temperature=0.9)
NGRAM = "ngram:k=4"  # the usual `auto` first measures what steps cost


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), draft=NGRAM, threads=1, num_rows=4, max_len=2048, max_queued_tokens=64) as found:
        yield found
        found.built.engine.check()
        assert not found.built.engine.scheduler.running


def test_generate_from_texts_and_ids(llm: LLM) -> None:
    one = llm.generate("the cat", SHORT)
    ids = llm.generate([list(one[0].prompt_ids)], SHORT)
    many = llm.generate(["in", "the cat", "on"], SHORT)
    assert [c.text for c in one] == [c.text for c in ids] == [many[1].text]
    assert one[0].seed == 4
    assert one[0].figures.completion_tokens == len(one[0].token_ids)
    assert llm.generate(one[0].prompt_ids, SHORT)[0].token_ids == one[0].token_ids


def test_calls_without_parameters_sample_as_the_model_asks(model: Path, tmp_path: Path, llm: LLM) -> None:
    assert llm.default_params == SamplingParams(temperature=0.7, top_p=0.95)
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.4, "top_k": 5, "top_p": -3}')
    hi = [{"role": "user", "content": "hi"}]
    with LLM(folder, draft=NGRAM, threads=1, num_rows=2, max_len=256) as own:  # type: ignore[arg-type]
        assert own.default_params == SamplingParams(temperature=0.4, top_k=5)
        given = own.chat(hi)
        same = SamplingParams(temperature=0.4, top_k=5, seed=given.seed, max_tokens=len(given.token_ids))
        assert own.chat(hi, same).token_ids == given.token_ids
    with LLM(folder, draft=NGRAM, threads=1, num_rows=2, max_len=256, sampling_defaults="neutral") as own:  # type: ignore[arg-type]
        assert own.default_params == SamplingParams()
    with pytest.raises(ConfigError, match="model or neutral"):
        LLM(str(model), sampling_defaults="mine")


def test_generate_takes_every_prompt_of_an_iterator(llm: LLM) -> None:
    texts = ["in", "the cat", "on"]
    found = llm.generate((text for text in texts), SHORT)
    assert [c.token_ids for c in found] == [c.token_ids for c in llm.generate(texts, SHORT)]
    ids = found[1].prompt_ids
    assert llm.generate(iter(ids), SHORT)[0].token_ids == found[1].token_ids
    assert llm.generate(iter([]), SHORT) == []
    with pytest.raises(RequestError, match="one or several"):
        llm.generate(5, SHORT)  # type: ignore[arg-type]


def test_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    done: list[int] = []
    prompts = [f"the cat number {i} in the hat" for i in range(24)]
    found = llm.generate(prompts, SHORT, lambda index, _: done.append(index))
    assert sorted(done) == list(range(24))
    alone = llm.generate(prompts[17], SHORT)[0]
    assert found[17].token_ids == alone.token_ids


def test_choices_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, n=3, logprobs=2, seed=1, temperature=1.5)
    completion = llm.generate("the", params)[0]
    assert len({a.text for a in completion.choices}) == 3
    for answer in completion.choices:
        assert answer.logprobs is not None
        assert tuple(entry.token_id for entry in answer.logprobs) == answer.token_ids


ANSWERS = {
    "warm": SHORT,
    "greedy": SamplingParams(max_tokens=12, temperature=0.0, frequency_penalty=0.5),
    "many": SamplingParams(max_tokens=12, n=3, seed=9, temperature=1.2),
    "scored": SamplingParams(max_tokens=12, logprobs=2, seed=2, repetition_penalty=1.2),
    "fixed form": SamplingParams(max_tokens=30, seed=3, grammar=Grammar("regex", "[a-z ]{10,20}")),
}


def told_of(completion: Completion, count: int) -> list[tuple[int, ...]]:
    """The first tokens of each answer, never all."""
    return [answer.token_ids[: min(count, len(answer.token_ids) - 1)] for answer in completion.choices]


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_cut_answer_that_goes_on_is_the_whole(llm: LLM, kind: str) -> None:
    (whole,) = llm.generate("the cat", ANSWERS[kind])
    for count in (0, 1, 5, 11):
        told = told_of(whole, count)
        given = told if len(told) > 1 else told[0]
        (again,) = llm.generate("the cat", ANSWERS[kind], answer_ids=given)
        deltas = list(llm.stream("the cat", ANSWERS[kind], answer_ids=given))
        for index, (new, old, begun) in enumerate(zip(again.choices, whole.choices, told, strict=True)):
            assert (new.text, new.token_ids, new.finish_reason) == (old.text, old.token_ids, old.finish_reason)
            assert new.figures.completion_tokens == len(old.token_ids)
            assert new.logprobs == (old.logprobs and old.logprobs[len(begun) :])
            behind = [i for d in deltas if d.choice == index for i in d.token_ids]
            assert (*begun, *behind) == old.token_ids


def test_answers_to_several_prompts_go_on(llm: LLM) -> None:
    prompts, params = ["in", "the cat", "on"], [replace(SHORT, n=n) for n in (1, 2, 1)]
    wholes = llm.generate(prompts, params)
    told = [ids for whole, count in zip(wholes, (3, 0, 7), strict=True) for ids in told_of(whole, count)]
    again = llm.generate(prompts, params, answer_ids=told)
    assert [[a.text for a in one.choices] for one in again] == [[a.text for a in one.choices] for one in wholes]


def test_an_answer_of_a_chat_goes_on(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = llm.chat(messages, SHORT)
    again = llm.chat(messages, SHORT, answer_ids=whole.token_ids[:4])
    assert (again.text, again.token_ids, again.message) == (whole.text, whole.token_ids, whole.message)


@pytest.mark.parametrize(
    ("answer_ids", "says"),
    [
        ("abc", "must be token ids"),
        ([1, "a"], "must be token ids"),
        ([[1], [2]], "a list of token ids"),
        (5, "must be token ids"),
        ([1 << 40], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([1] * 13, "max_tokens"),
        ([1] * 12, "ended"),
    ],
)
def test_bad_answers_so_far(llm: LLM, answer_ids: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate("the cat", SHORT, answer_ids=answer_ids)
    with pytest.raises(RequestError, match="scores of a prompt"):
        llm.generate("the cat", replace(SHORT, prompt_logprobs=1), answer_ids=[1])


def test_streams_may_be_mixed_and_left(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = llm.chat(messages, SHORT)
    first, second = llm.stream(messages, SHORT), llm.stream("the", SHORT)
    text = next(first).text
    next(second)
    second.close()
    deltas = list(first)
    assert text + "".join(d.text for d in deltas) == whole.text
    assert deltas[-1].finish_reason == whole.finish_reason
    assert deltas[-1].figures is not None


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_a_stream_that_is_left_is_cancelled(llm: LLM, begun: bool, closed: bool) -> None:
    stream = llm.stream("the", SamplingParams(max_tokens=500, n=2, ignore_eos=True))
    if begun:
        next(stream)
    assert len(llm.built.engine.scheduler.requests) == 2
    if closed:
        stream.close()
    del stream
    llm.generate("in", SHORT)
    assert not llm.built.engine.scheduler.requests
    assert not llm._sinks


@pytest.mark.parametrize("prompt", [5.5, [1, "a"], [-1], None, [1.5]])
def test_bad_prompts(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate([prompt], SHORT)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [{"max_tokens": 3}], 3])
def test_params_of_another_type(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="must be SamplingParams"):
        llm.generate(["the"], params)


def test_one_bad_request_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate(["the", "in " * 3000], SHORT)
    with pytest.raises(PromptTooLong):
        llm.generate(["the", "in"], [SHORT, SamplingParams(max_tokens=4000)])
    with pytest.raises(RequestError, match="need one"):
        llm.generate(["the", "in"], [SHORT])
    assert llm.generate("the", SHORT)[0].token_ids


@pytest.mark.parametrize("bad", [[65] * 2040, [70_000]])
def test_a_bad_prompt_late_in_a_batch_is_found_before_any_is_answered(llm: LLM, bad: list[int]) -> None:
    done: list[int] = []
    with pytest.raises(RequestError):
        llm.generate([*["the cat number"] * 30, bad], SHORT, lambda index, _: done.append(index))
    assert done == []


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell starts jobs in the background with SIGINT ignored; here it must work as in the foreground."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("way", ["stream", "generate"])
def test_ctrl_c_waits_for_the_step(llm: LLM, way: str) -> None:
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    stream = llm.stream("the", params)
    next(stream)
    step = llm.built.engine.step

    def pressed() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        outcomes = step()
        llm.built.engine.step = step  # type: ignore[method-assign]
        return outcomes

    llm.built.engine.step = pressed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        list(stream) if way == "stream" else llm.generate("the", params)
    stream.close()
    llm.built.engine.check()
    assert llm.generate("the", SHORT)[0].token_ids


def test_unknown_options_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'threads'"):
        LLM("default", thread=3)
    with pytest.raises(ConfigError, match="between"):
        LLM("default", threads=0)


def test_a_closed_llm_says_so(model: Path) -> None:
    llm = LLM(str(model), draft=NGRAM, threads=1)
    llm.close()
    with pytest.raises(EngineDied, match="closed"):
        llm.generate("a")


# Commands --------------------------------------------------------------------------------------------


GIVEN = {"max_tokens": 12, "seed": 4, "temperature": 0.9, "top_p": 1.0}


def chat_with(llm: LLM, system: str | None, text: str, sink: io.StringIO) -> Chat:
    return Chat(LocalSpeaker(llm), dict(GIVEN), system, LineInput(io.StringIO(text)), sink)


def test_chat_keeps_the_conversation_and_obeys_commands(llm: LLM) -> None:
    source = io.StringIO("hello\n\n/nonsense\n/help\nmore\n/reset\nagain\n/quit\nnever read\n")
    sink = io.StringIO()
    chat = Chat(LocalSpeaker(llm), dict(GIVEN), "be kind", LineInput(source), sink)
    chat.run(obey)
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[1]["content"] == "again"
    written = sink.getvalue()
    assert written.count("tokens/s") == 3
    assert written.count("tokens per pass") == 3
    assert "unknown command /nonsense" in written
    assert source.readline() == "never read\n"


def test_an_answer_fills_the_context_unless_a_limit_is_given_and_says_that_it_was_cut(model: Path) -> None:
    sink = io.StringIO()
    with LLM(str(model), draft=NGRAM, threads=1, num_rows=1, max_len=400) as own:
        chat = Chat(LocalSpeaker(own), {"temperature": 0.0, "ignore_eos": True}, sink=sink)
        chat.answer("hello")
        room = own.prompts.room(own.prompts.of_messages([{"role": "user", "content": "hello"}]))
    assert chat.totals.answers[0].completion_tokens == room > SamplingParams().max_tokens
    assert f"[{room} tokens, reached the token limit, " in sink.getvalue()


def test_chat_survives_ctrl_c_and_a_conversation_that_is_too_long(llm: LLM) -> None:
    class Pressed(io.StringIO):
        def write(self, text: str) -> int:
            if self.tell() == 0:
                super().write("x")
                raise KeyboardInterrupt
            return super().write(text)

    sink = Pressed()
    chat = chat_with(llm, None, "hello\n" + "in " * 3000 + "\nhello\n", sink)
    chat.run(obey)
    assert "[stopped]" in sink.getvalue()
    assert "error: the prompt has" in sink.getvalue()
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_chat_tells_an_answer_that_failed_and_forgets_it(llm: LLM) -> None:
    sink = io.StringIO()
    chat = chat_with(llm, "be kind", "hello\n", sink)
    chat.reset()
    before = list(chat.messages)
    step = llm.built.engine.step

    def failing() -> list[Outcome]:
        return [with_fields(o, finish_reason="error", error="no more memory") for o in step()]

    llm.built.engine.step = failing  # type: ignore[method-assign]
    try:
        chat.answer("hello")
    finally:
        llm.built.engine.step = step  # type: ignore[method-assign]
    assert "error: no more memory" in sink.getvalue()
    assert "tokens/s" not in sink.getvalue()
    assert chat.messages == before
    chat.answer("hello")
    assert len(chat.messages) == 3


def test_a_model_cannot_steer_the_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert printable("a\x1b[2J\tb\nc\x9b\r", Terminal()) == "a\ufffd[2J\tb\nc\ufffd\ufffd"
    assert printable("\x1b", io.StringIO()) == "\x1b"


def command(model: Path, *arguments: str) -> int:
    return main([*arguments, "--model", str(model), "--draft", NGRAM, "--threads", "1", "--max-len", "2048"])


def test_generate_writes_text(model: Path, capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
    assert command(model, "generate", "the cat", "--max-tokens", "12", "--seed", "4", "--temperature", "0.9") == 0
    assert capsys.readouterr().out == llm.generate("the cat", SHORT)[0].text + "\n"


def test_generate_writes_json_lines(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], llm: LLM
) -> None:
    rows = [
        {"prompt": "the cat"},
        {"question_id": 81, "category": "x", "turns": ["hi", "ho"]},
        {"id": "m", "messages": [{"role": "user", "content": "hi"}]},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    flags = ["--json", "--n", "2", "--max-tokens", "12", "--seed", "4", "--temperature", "0.9", "--top-p", "1"]
    assert command(model, "generate", "--prompts", str(path), *flags) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["id"], row["choice"]) for row in found] == [(i, c) for i in (1, 81, "m") for c in (0, 1)]
    assert found[2]["text"] == found[4]["text"] == llm.chat([{"role": "user", "content": "hi"}], SHORT).text
    assert found[0]["figures"]["seed"] == 4


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"turns": []}', '{"prompt": 5}', "\xff"])
def test_generate_refuses_bad_files(model: Path, tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(line, encoding="latin-1")
    assert command(model, "generate", "--prompts", str(path)) == 2


@pytest.mark.parametrize("flags", [[], ["--capture", "answers"], ["--json"]])
def test_generate_names_the_line_of_a_prompt_that_is_too_long(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    path, capture = tmp_path / "p.jsonl", str(tmp_path / "answers")
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the cat", "the cat " * 400)))
    flags = [capture if flag == "answers" else flag for flag in flags]
    assert command(model, "generate", "--prompts", str(path), "--max-tokens", "1800", *flags) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert f"{path}, line 2: the prompt has" in written.err


def test_chat_and_generate_read_standard_input(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("chat", "generate"):
        monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
        assert command(model, name, "--max-tokens", "5", "--seed", "1") == 0  # some seeds write white space
        assert capsys.readouterr().out.strip()


def test_chat_calls_tools_and_reads_its_answer(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    params = SamplingParams(max_tokens=200, seed=1)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    asked = {"tools": [tool], "tool_choice": "weather"}
    completion = llm.chat(messages, params, **asked)
    assert completion.message is not None
    (call,) = completion.message.calls
    assert (call.name, json.loads(call.arguments).keys()) == ("weather", {"warm"})
    history = {"role": "assistant", "content": None, "tool_calls": [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    ]}  # fmt: skip
    messages += [history, {"role": "tool", "content": "ok"}]
    again = llm.chat(messages, params, tools=[tool], tool_choice="none")
    assert again.message is not None
    assert (again.message.content, again.message.calls) == (again.text, ())
    with pytest.raises(RequestError, match="not among the tools"):
        llm.chat(messages, params, tools=[tool], tool_choice="other")
    with pytest.raises(RequestError, match="tools"):
        llm.chat(messages, params, tools=[{"function": 1}])
