"""Jobs of the sandbox and their results: typed msgpack, never pickle."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from paceline.engine.wire import Message
from paceline.model.template_source import TemplateSource

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FRAME_BYTES = 512 << 20
_LENGTH = struct.Struct("<I")


class SetTemplate(Message, frozen=True):
    """The chat template that later jobs render."""

    source: TemplateSource


class SetTokenizer(Message, frozen=True):
    """The tokenizer that grammars are checked against."""

    tokenizer_json: bytes
    eos_ids: tuple[int, ...]
    bos_id: int | None


class RenderPrompts(Message, frozen=True):
    """Render the template with each mapping of variables."""

    asked: bytes  # a list of them in JSON: msgpack has no integers beyond 64 bits, and conversations may


class CheckGrammar(Message, frozen=True):
    """Compile a grammar, to see that it can be."""

    kind: str
    text: str
    with_tokens: bool  # it names tokens of the tokenizer


class Rendered(Message, frozen=True):
    """Texts of `RenderPrompts`."""

    texts: tuple[str, ...]


class JobDone(Message, frozen=True):
    """A job without a result is done."""


class JobRefused(Message, frozen=True):
    """A job failed, for a reason its client caused."""

    message: str
    param: str | None = None
    of_model: bool = False  # the model's files are bad, not the request
    ends: bool = False  # the process ends, as its memory ran out


SetupJob = SetTemplate | SetTokenizer | CheckGrammar
SandboxJob = SetTemplate | SetTokenizer | RenderPrompts | CheckGrammar
JobResult = Rendered | JobDone | JobRefused

decode_job = msgspec.msgpack.Decoder(SandboxJob).decode
decode_result = msgspec.msgpack.Decoder(JobResult).decode


def frame(message: Message) -> bytes:
    """Return a message as it is sent. Raises `ValueError` if it is too large."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError("a message to or from the sandbox is too large")
    return _LENGTH.pack(len(data)) + data


def read_frame(receive: Callable[[int], bytes]) -> bytes | None:
    """Return the next message's bytes, None at the end. receive: as `socket.recv`."""
    head = _exactly(receive, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError("a message to or from the sandbox is too large")
    return _exactly(receive, length)


def _exactly(receive: Callable[[int], bytes], count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = receive(min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)
