"""Routes about tokens that ask no engine, in vLLM's form: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from paceline.core.errors import RequestError
from paceline.engine.wire import TokenId
from paceline.serve.api.fields import Body
from paceline.serve.api.schema import MAX_MESSAGES, ChatMessage, Name
from paceline.serve.api.tools import TemplateKwargs, Tools, template_kwargs
from paceline.serve.conversation import Conversation, ToolUse

if TYPE_CHECKING:
    from paceline.serve.api.parse import Serving

MAX_IDS = 1 << 20

Json = dict[str, Any]


class TokenizeBody(Body, frozen=True, kw_only=True):
    """The body of POST /tokenize: a text, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    def check(self) -> None:
        """Raise `RequestError` unless there is one of prompt and messages."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages", "prompt")

    def ids(self, serving: Serving) -> list[int]:
        """Return the token ids. Raises `RequestError`."""
        if self.prompt is not None:
            return serving.prompts.tokenizer.encode(self.prompt, self.add_special_tokens is not False)
        messages = [message.for_template() for message in self.messages or ()]
        tools = [tool.function.tool(tool.strict) for tool in self.tools or ()]
        given = template_kwargs(self.chat_template_kwargs)
        continues = bool(self.continue_final_message)
        prompted = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        use = ToolUse(tuple(tools)) if tools else None
        return list(serving.prompts.of_conversation(Conversation(messages, use, given, prompted, continues)).ids)


class DetokenizeBody(Body, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
    model: Name | None = None


def tokenize(data: bytes, serving: Serving) -> Json:
    """Return the response to a body of POST /tokenize. Raises `RequestError`."""
    body, _ = TokenizeBody.decode(data, lenient=serving.lenient)
    serving.check_model(body.model)
    ids, tokenizer = body.ids(serving), serving.prompts.tokenizer
    strings = [tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": serving.prompts.max_len, "tokens": ids, "token_strs": strings}


def detokenize(data: bytes, serving: Serving) -> Json:
    """Return the response to a body of POST /detokenize. Raises `RequestError`."""
    body, _ = DetokenizeBody.decode(data, lenient=serving.lenient)
    serving.check_model(body.model)
    size = serving.prompts.vocab_size
    if size is not None and any(token_id >= size for token_id in body.tokens):
        raise RequestError(f"tokens names ids outside the vocabulary of {size}", "tokens")
    return {"prompt": serving.prompts.tokenizer.decode(body.tokens, skip_special=False)}


def tokenizer_info(serving: Serving) -> Json:
    """Return what clients that render chats themselves need to know, as lm-eval does."""
    prompts, tokenizer = serving.prompts, serving.prompts.tokenizer
    eos = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    bos = tokenizer.bos_id
    return {
        "tokenizer_class": type(tokenizer.raw).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": prompts.max_len,
        "eos_token": None if eos is None else tokenizer.token_text(eos),
        "bos_token": None if bos is None else tokenizer.token_text(bos),
        "pad_token": None if eos is None else tokenizer.token_text(eos),
        "chat_template": None if prompts.template is None else prompts.template.source.text,
    }
