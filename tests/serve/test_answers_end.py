"""Grammars of answers with tools: wherever prose leads, the answer can end without a call that nobody wanted."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
from llguidance import LLMatcher

from paceline.model import grammar as grammars
from paceline.serve.api.answer_blocks import AnswerBlocks
from paceline.serve.api.tool_calls.registry import BY_NAME
from paceline.serve.conversation import ToolUse
from tests.serve.test_tool_calls import MARKED, PLAIN, ROME, TOOLS, forms_of, message, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.model.tokenizer import Tokenizer
    from paceline.serve.api.tool_calls.family import ToolFamily
    from paceline.serve.api.tool_calls.plan import AnswerForms

PROSE = (
    "It is sunny. Anything else?",
    'Use {"city": 1}, { x } or\n```json\n{"a": [1]}\n```\n.',
    '{"temperature": 20, "name": "Rome"}',
    '{"name": "Rome", "days": 2} and <b>more</b>.',
    "\n\nThis will tell.",
    "",
)
THOUGHTS = 'so {"name": "x"\n</think>\n\n'
BARE = [name for name, family in BY_NAME.items() if family.bare_key]
both_tokenizers = pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["text", "tokens"])
every_family = pytest.mark.parametrize("name", [name for name in BY_NAME if name != "harmony"])


def matcher_of(forms: AnswerForms, *, opened: bool, parallel: bool = True) -> LLMatcher:
    grammar = forms.grammar(ToolUse(TOOLS, parallel=parallel), None, opened)
    assert grammar is not None
    vocabulary = grammars._vocabulary(forms.tokenizer, forms.tokenizer.vocab_size)
    return grammars._matcher(vocabulary, grammar)


def reads(matcher: LLMatcher, tokenizer: Tokenizer, text: str) -> None:
    """Take a text that the grammar must allow."""
    ids = tokenizer.encode(text, add_special=False)
    assert matcher.consume_tokens(ids), text


def reads_prose(matcher: LLMatcher, tokenizer: Tokenizer, text: str) -> str:
    """Take a text as far as it is allowed and return that; at each token the answer must be able to end."""
    ids = tokenizer.encode(text, add_special=False)
    for at, token_id in enumerate(ids):
        assert can_end(matcher, tokenizer), tokenizer.decode(ids[:at])
        if matcher.validate_tokens([token_id]) == 0:
            return tokenizer.decode(ids[:at])
        matcher.consume_token(token_id)
    assert can_end(matcher, tokenizer), text
    return text


def can_end(matcher: LLMatcher, tokenizer: Tokenizer) -> bool:
    """Whether an end may follow, perhaps behind a quotation mark that ends another object's name."""
    if matcher.is_accepting():
        return True
    closed = matcher.deep_copy()
    return closed.validate_tokens(ids := tokenizer.encode('"', add_special=False)) == len(ids) and (
        closed.consume_tokens(ids) and closed.is_accepting()
    )


def calls_of(family: ToolFamily, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield texts with one call, and whether it has no marker."""
    if family.bare_key is not None:
        bare = f'{{"name": "{ROME[0]}", "{family.bare_key}": {ROME[1]}}}'
        yield bare, True
        yield f"So:\n```json\n{{{bare}}}\n```\n", True
    if family.openers:
        with_args = tokenizer is MARKED and family.name == "mistral"
        written = f"[TOOL_CALLS]{ROME[0]}[ARGS]{ROME[1]}" if with_args else family.written(*ROME)
        yield written if family.openers[0] in written else family.openers[0] + written, False


def beginnings(name: str, tokenizer: Tokenizer) -> Iterator[tuple[AnswerForms, bool, str]]:
    """Yield forms, whether the prompt opens the reasoning, and how an answer begins."""
    yield forms_of(name, tokenizer), False, ""
    thinking = forms_of(name, tokenizer, thinks=True)
    yield thinking, False, ""
    yield thinking, False, "<think>\n" + THOUGHTS
    yield thinking, True, THOUGHTS
    yield thinking, False, "\n<think>" + THOUGHTS


@every_family
@both_tokenizers
@pytest.mark.parametrize("parallel", [True, False])
def test_prose_can_end_at_every_token(name: str, tokenizer: Tokenizer, parallel: bool) -> None:
    for (forms, opened, begun), prose in product(beginnings(name, tokenizer), PROSE):
        matcher = matcher_of(forms, opened=opened, parallel=parallel)
        reads(matcher, tokenizer, begun)
        assert reads_prose(matcher, tokenizer, prose) == prose


@every_family
@both_tokenizers
@pytest.mark.parametrize("parallel", [True, False])
def test_an_answer_can_end_behind_a_call_whatever_is_tried(
    name: str, tokenizer: Tokenizer, parallel: bool
) -> None:
    family = BY_NAME[name]
    for forms, opened, begun in beginnings(name, tokenizer):
        for (call, bare), prose in product(calls_of(family, tokenizer), PROSE):
            matcher = matcher_of(forms, opened=opened, parallel=parallel)
            reads(matcher, tokenizer, begun + call)
            done = reads_prose(matcher, tokenizer, prose)
            assert done == prose or not (bare and parallel)
            found = read(forms, tokenizer.encode(begun + call + done, add_special=False), (), opened=opened)
            assert found[2] == [ROME]


@pytest.mark.parametrize("name", BARE)
@both_tokenizers
def test_calls_go_on_behind_prose_and_in_any_form(name: str, tokenizer: Tokenizer) -> None:
    texts = [call for call, _ in calls_of(BY_NAME[name], tokenizer)]
    for (forms, opened, begun), last in product(beginnings(name, tokenizer), texts):
        matcher = matcher_of(forms, opened=opened)
        whole = f"{begun}First: {texts[0]}\nand then\n\n{last}"
        reads(matcher, tokenizer, whole)
        assert matcher.is_accepting()
        _, content, calls = read(forms, tokenizer.encode(whole, add_special=False), (), opened=opened)
        assert calls == [ROME, ROME]
        assert content.startswith("First:\n\nand then")


@every_family
@both_tokenizers
def test_reasoning_that_the_model_opens_is_not_held_to_calls(name: str, tokenizer: Tokenizer) -> None:
    forms = forms_of(name, tokenizer, thinks=True)
    matcher = matcher_of(forms, opened=False)
    reads(matcher, tokenizer, '<think>{"name": "weather"} is the tool.</think>Yes.')
    assert matcher.is_accepting()


@both_tokenizers
def test_messages_in_channels_can_end_at_every_token(tokenizer: Tokenizer) -> None:
    forms = forms_of("harmony", tokenizer)
    for before in ("", message("analysis", "so {"), message("commentary", "First:")):
        for prose in PROSE:
            matcher = matcher_of(forms, opened=False)
            reads(matcher, tokenizer, before + "<|channel|>final<|message|>")
            assert reads_prose(matcher, tokenizer, prose) == prose


def test_text_behind_a_call_is_a_paragraph_and_where_parts_are_told_apart_a_part() -> None:
    reader_plan = forms_of("json", PLAIN).reader_plan(ToolUse(TOOLS), opened=False)
    assert reader_plan is not None
    (call, _), *_ = calls_of(BY_NAME["json"], PLAIN)
    for pieces in ([f"So:\n{call}\n\n Done."], [*f"So:\n{call}\n\n Done."]):
        blocks = AnswerBlocks(reader_plan.reader())
        changes = [change for piece in pieces for change in blocks.push(piece, (), ends=False)]
        changes += blocks.push("", (), ends=True)
        assert [(block.kind, block.text) for block in blocks.blocks] == [
            ("content", "So:"),
            ("call", ROME[1]),
            ("content", "Done."),
        ]
        assert "".join(c.text for c in changes if c.block.index == 2) == "Done."
