"""Tokenizers kept for later starts: whole as JSON, and how their tokens are written."""

from __future__ import annotations

from array import array
from importlib.metadata import version
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import msgspec

from paceline.model.files.kept_data import KeptData

if TYPE_CHECKING:
    import tokenizers

    from paceline.model.spelling import Spelling

_ENDS: Final = "I"  # array type of the places in `ends`
_END_BYTES = array(_ENDS).itemsize  # a constant: it is needed for every token that a step makes
_LIBRARY = version("tokenizers")
_WHOLE, _TABLES = KeptData("tokenizers", _LIBRARY), KeptData("token-tables", _LIBRARY)


class TokenTable(msgspec.Struct, frozen=True):
    """Spelling in three pieces of memory, which are read from a file at once."""

    ends: bytes  # [num_tokens] where each token's bytes end, 32 bits each
    text: bytes  # bytes of all tokens, one after another
    special: frozenset[int]
    strips_space: bool

    @classmethod
    def of(cls, spelling: Spelling) -> TokenTable:
        """Write down another spelling."""
        tokens = [spelling.bytes_of(i) for i in range(spelling.num_tokens)]
        ends = array(_ENDS, accumulate(map(len, tokens)))
        return cls(ends.tobytes(), b"".join(tokens), frozenset(spelling.special), spelling.strips_space)

    @property
    def num_tokens(self) -> int:
        """One more than the largest id."""
        return len(self.ends) // _END_BYTES

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an unknown id."""
        if not 0 <= token_id < self.num_tokens:
            return b""
        ends = memoryview(self.ends).cast(_ENDS)
        return self.text[ends[token_id - 1] if token_id else 0 : ends[token_id]]


_as_table = msgspec.msgpack.Decoder(TokenTable).decode


def kept_tokenizer(digest: str) -> bytes | None:
    """Return a tokenizer's JSON, None if it is not kept or broken.

    digest: of what the tokenizer is built from.
    """
    return _WHOLE.read(digest)


def keep_tokenizer(digest: str, json: bytes, table: TokenTable) -> None:
    """Keep a tokenizer's JSON and the table of its tokens."""
    _WHOLE.write(digest, json)
    _TABLES.write(digest, msgspec.msgpack.encode(table))


def kept_table(digest: str) -> TokenTable | None:
    """Return the table of a tokenizer's tokens, None if it is not kept or broken."""
    data = _TABLES.read(digest)
    return None if data is None else _as_table(data)


def read_kept(digest: str) -> tokenizers.Tokenizer | None:
    """Build the kept tokenizer; None if it was removed meanwhile."""
    import tokenizers

    json = kept_tokenizer(digest)
    return None if json is None else tokenizers.Tokenizer.from_buffer(json)
