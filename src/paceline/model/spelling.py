"""Tokens of a vocabulary as bytes, as the library's tokenizer writes them."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level BPE (GPT-2).

    A printable byte is its own character; the others are numbered from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = byte_alphabet()


def _byte_level(token: str) -> bytes:
    if all(char in BYTE_OF for char in token):
        return bytes(BYTE_OF[char] for char in token)
    return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


# Decoder in tokenizer.json -> function from a vocabulary entry to its bytes.
BYTE_DECODERS: dict[str, Callable[[str], bytes]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _sentence_piece,
    "Metaspace": _sentence_piece,
}


class Spelling(Protocol):
    """Tokens of a vocabulary as bytes."""

    @property
    def strips_space(self) -> bool:
        """True if a text gets a space before it, which is not shown."""

    @property
    def num_tokens(self) -> int:
        """One more than the largest id."""

    @property
    def special(self) -> Collection[int]:
        """Tokens that steer the model and are not text."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an unknown id."""


class RawSpelling:
    """Tokens as the library's tokenizer writes them."""

    def __init__(self, raw: tokenizers.Tokenizer, decode: Callable[[str], bytes], *, strips_space: bool) -> None:
        """Read the added tokens. decode: vocabulary entry -> bytes, one of `BYTE_DECODERS`."""
        self.strips_space = strips_space
        self._raw, self._decode = raw, decode
        added = raw.get_added_tokens_decoder()
        # SentencePiece writes a space as "▁" in added tokens, too: Gemma has runs of spaces among them.
        self._added = {
            i: token.content for i, token in added.items() if token.special or decode != _sentence_piece
        }
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def num_tokens(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._raw.get_vocab(with_added_tokens=True).values(), default=-1)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an unknown id."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._raw.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self._decode(token)


class KnownBytes(dict[int, bytes]):
    """Bytes of tokens by their ids, computed when an id is first looked up."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """bytes_of: computes the bytes of a token."""
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._bytes_of(token_id)
        return found


class TokenBytes:
    """Bytes of every token of a vocabulary, looked up when a token is first seen."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self.whole = KnownBytes(spelling.bytes_of)  # not always whole characters; b"" for an unknown id
        self.visible = KnownBytes(self._visible_bytes_of)  # what a token adds to a text

    def is_special(self, token_id: int) -> bool:
        """Return True if a token steers the model and is not text."""
        return token_id in self.spelling.special

    def _visible_bytes_of(self, token_id: int) -> bytes:
        return b"" if self.is_special(token_id) else self.whole[token_id]
