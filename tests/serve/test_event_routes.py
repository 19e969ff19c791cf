"""Bodies and answers of /v1/messages and /v1/responses, without a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from paceline.core.errors import RequestError
from paceline.serve.api.messages_schema import MessagesBody

if TYPE_CHECKING:
    from paceline.serve.conversation import Conversation

USER = {"role": "user", "content": "a"}


def asked(**more: Any) -> Conversation:
    """The conversation of a body of /v1/messages."""
    body = {"max_tokens": 9, "messages": [USER]} | more
    return MessagesBody.decode(json.dumps(body).encode())[0].conversation()


# Messages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edits", [[], [{"type": "clear_thinking_20251015", "keep": "all"}]])
def test_edits_of_the_context_are_taken_if_they_clear_nothing(edits: list[Any]) -> None:
    assert asked(context_management={"edits": edits}).messages == [USER]
    turns = {"type": "thinking_turns", "value": 1}
    for edit in ({"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015", "keep": turns}):
        with pytest.raises(RequestError, match="context_management is not supported yet"):
            asked(context_management={"edits": [*edits, edit]})


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_every_effort_reaches_the_template(effort: str) -> None:
    given = {"reasoning_effort": effort, "enable_thinking": True}
    assert asked(output_config={"effort": effort}).template_kwargs == given


@pytest.mark.parametrize("system", [None, "", [], [{"type": "text", "text": ""}]])
def test_a_system_prompt_without_text_is_none(system: Any) -> None:
    """Templates have their own where no message of role system comes."""
    assert asked(system=system).messages == [USER]
    assert asked(system=[{"type": "text", "text": "b"}]).messages == [{"role": "system", "content": "b"}, USER]
