"""Token ids to text while an answer grows: the tokenizer's part in a decode step."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


# Conversion of a vocabulary entry to bytes, by the decoder in tokenizer.json that implies it.
BYTE_DECODERS: dict[str, Callable[[str], bytes]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _sentence_piece,
    "Metaspace": _sentence_piece,
}


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
    """Bytes of every token of a vocabulary."""

    def __init__(self, raw: tokenizers.Tokenizer, decode: Callable[[str], bytes]) -> None:
        """Read the added tokens. decode: vocabulary entry -> bytes, one of `BYTE_DECODERS`."""
        self._raw = raw
        self._decode = decode
        self._added: Mapping[int, tuple[str, bool]] = {
            i: (t.content, t.special) for i, t in raw.get_added_tokens_decoder().items()
        }
        self.whole = KnownBytes(self._bytes_of)  # not always whole characters; b"" for an unknown id
        self.visible = KnownBytes(self._visible_bytes_of)  # what a token adds to a text

    def is_special(self, token_id: int) -> bool:
        """Return True if a token steers the model and is not text."""
        return self._added.get(token_id, ("", False))[1]

    def _visible_bytes_of(self, token_id: int) -> bytes:
        return b"" if self.is_special(token_id) else self.whole[token_id]

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id][0].encode()
        token = self._raw.id_to_token(token_id)
        return b"" if token is None else self._decode(token)


class Detokenizer:
    """Text of a growing answer.

    All that `push` and `flush` return, joined, equals `decode` of all ids. A character whose bytes are split over
    tokens is held back until it is complete. `kernels.make_outcomes` does what `push` does, where nothing is held
    back before the tokens or behind them.
    """

    __slots__ = ("_at_start", "_held_bytes", "_pieces")

    def __init__(self, pieces: Mapping[int, bytes], strips_space: bool) -> None:
        """pieces: bytes of tokens. strips_space: the space before a text is not shown."""
        self._pieces = pieces
        self._held_bytes = b""  # of an unfinished character
        self._at_start = strips_space

    def push(self, ids: Sequence[int]) -> str:
        """Take further tokens and return the text that became certain."""
        pieces = self._pieces
        data = pieces[ids[0]] if len(ids) == 1 else b"".join([pieces[i] for i in ids])
        return self._read(data, final=False) if data else ""

    def flush(self) -> str:
        """Return what is left of an unfinished character. Call once, at the end."""
        return self._read(b"", final=True)

    def _read(self, data: bytes, *, final: bool) -> str:
        whole = self._held_bytes + data
        text, num_read = codecs.utf_8_decode(whole, "replace", final)
        self._held_bytes = whole[num_read:]
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
