"""Token ids to text while an answer grows: the tokenizer's part in a decode step."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Detokenizer:
    """Text of a growing answer.

    All that `push` and `flush` return, joined, equals `decode` of all ids. A character whose bytes are split over
    tokens is held back until it is complete. `kernels.make_outcomes` does the same as `push`, for tokens where
    nothing is held back before or after them.
    """

    __slots__ = ("_at_start", "_held_bytes", "_pieces")

    def __init__(self, pieces: Mapping[int, bytes], strips_space: bool) -> None:
        """pieces: bytes of tokens. strips_space: a space before them is not shown."""
        self._pieces = pieces
        self._held_bytes = b""  # bytes of an unfinished character
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
