"""From a target's text to a drafter's tokens, and from guesses to target tokens.

Two ways (arXiv 2502.05202). `tokens`: each of the target's tokens is spelled by itself, and only tokens that both
vocabularies have are guessed (token-level intersection). `strings`: the drafter reads and continues the text as
its own tokenizer writes it, and the target's tokenizer reads the guesses back (string-level exact match).
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Protocol

from paceline.draft.model.id_map import IdMap, all_ids, by_text, shared_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.draft.drafter import Vocabulary
    from paceline.draft.model.id_map import TokenMap

MAX_TAIL_BYTES = 512  # most bytes at a text's end that are tokenized anew when it grows
KEPT_TAIL_BYTES = 128  # bytes that stay in a tail when it gets too long


class Retokenizer(Protocol):
    """One row's text in both vocabularies."""

    passes_per_draft: ClassVar[int]  # passes of the drafter at most
    has_probs: ClassVar[bool]  # True if guesses come with a distribution over the target's tokens

    def renew(self, token_ids: NDArray[int64]) -> tuple[int, list[int]] | None:
        """Take in the row's committed tokens, as target tokens.

        Returns the index from which on the drafter's text is new, and the new tokens; None while it is unknown.
        """

    def id_map(self, guesses: Sequence[int]) -> IdMap:
        """Return what may follow the drafter's guesses."""

    def read(self, guesses: Sequence[int]) -> list[int]:
        """Return the target's tokens that the drafter's guesses stand for."""

    def ended(self, guesses: Sequence[int]) -> bool:
        """Return True if nothing can follow these guesses."""


class VocabularyPair:
    """Two vocabularies and all that rows share of their comparison."""

    def __init__(self, target: Vocabulary, drafter: Vocabulary, tokens: TokenMap) -> None:
        self.target, self.drafter = target.tokenizer, drafter.tokenizer
        self.tokens = tokens
        self.shared = shared_ids(tokens)
        self.all = all_ids(tokens, drafter)
        self.behind_space = all_ids(tokens, drafter, b" ")
        self._bytes = {text: i for text, i in by_text(drafter.tokenizer).items() if len(text) == 1}
        self._spelled: dict[int, list[int]] = {}

    def spell(self, token_id: int) -> list[int]:
        """Return one of the target's tokens, spelled in the drafter's."""
        found = self._spelled.get(token_id)
        if found is None:
            found = self._spelled[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> list[int]:
        draft_id = int(self.tokens.to_drafter[token_id])
        if draft_id >= 0:
            return [draft_id]
        if token_id == self.target.bos_id:  # the drafter's texts begin without such a token
            return []
        data = self.target.token_bytes(token_id)
        text = whole_text(data)
        if len(text.encode()) == len(data):
            return self.drafter.encode_within(text)
        return [self._bytes[part] for part in (data[i : i + 1] for i in range(len(data))) if part in self._bytes]


class TokenRetokenizer:
    """Token for token. The drafter may read several tokens for one, but guesses single ones."""

    passes_per_draft: ClassVar[int] = 1
    has_probs: ClassVar[bool] = True

    def __init__(self, pair: VocabularyPair) -> None:
        self._pair = pair
        self._num_read = 0  # number of target tokens that were read
        self._num_spelled = 0  # number of drafter tokens that spell these

    def renew(self, token_ids: NDArray[int64]) -> tuple[int, list[int]] | None:
        """See `Retokenizer`. What is spelled stays as it is."""
        first = self._num_spelled
        new = [i for token_id in token_ids[self._num_read :].tolist() for i in self._pair.spell(token_id)]
        self._num_read, self._num_spelled = len(token_ids), first + len(new)
        return (first, new) if self._num_spelled else None

    def id_map(self, guesses: Sequence[int]) -> IdMap:
        """See `Retokenizer`."""
        return self._pair.shared

    def read(self, guesses: Sequence[int]) -> list[int]:
        """See `Retokenizer`."""
        return [int(self._pair.tokens.to_target[i]) for i in guesses]

    def ended(self, guesses: Sequence[int]) -> bool:
        """See `Retokenizer`."""
        return False


@dataclass(slots=True)
class _Tail:
    """The end of a text whose tokens may still change."""

    data: bytearray = field(default_factory=bytearray)
    settled: int = 0  # tokens before it that `renew` returned
    unsent: list[int] = field(default_factory=list)  # tokens before it that it did not return yet


class StringRetokenizer:
    """Text as the drafter's own tokenizer writes it. A last space goes to what follows."""

    passes_per_draft: ClassVar[int] = 2  # its tokens may be shorter than the target's
    has_probs: ClassVar[bool] = False

    def __init__(self, pair: VocabularyPair) -> None:
        self._pair = pair
        self._num_read = 0  # number of target tokens that were read
        self._tail = _Tail()
        self._owed = b""  # end of the text that guesses must begin with

    def renew(self, token_ids: NDArray[int64]) -> tuple[int, list[int]] | None:
        """See `Retokenizer`. None where the text ends inside a character."""
        target, tail = self._pair.target, self._tail
        for token_id in token_ids[self._num_read :].tolist():
            if target.is_special(token_id):
                tail.unsent += self._write(tail.data) + self._pair.spell(token_id)
                tail.data.clear()
            else:
                tail.data += target.token_bytes(token_id)
        self._num_read = len(token_ids)
        text, unfinished = readable(tail.data)
        tail.data = bytearray(text.encode() + unfinished)
        self._owed = b" " if text.endswith(" ") else b""
        written = self._write(text.encode().removesuffix(self._owed))
        first, new = tail.settled, tail.unsent + written
        if unfinished or not first + len(new):
            return None
        tail.settled = first + len(tail.unsent)
        tail.unsent = []
        self._settle(written)
        return first, new

    def id_map(self, guesses: Sequence[int]) -> IdMap:
        """See `Retokenizer`."""
        return self._pair.behind_space if self._owed and not guesses else self._pair.all

    def read(self, guesses: Sequence[int]) -> list[int]:
        """See `Retokenizer`."""
        steering = self._steering(guesses)
        text = whole_text(self._text(guesses[: len(guesses) - len(steering)]).removeprefix(self._owed))
        return self._pair.target.encode_within(text) + steering

    def ended(self, guesses: Sequence[int]) -> bool:
        """See `Retokenizer`."""
        return self._pair.drafter.is_special(guesses[-1])

    def _steering(self, guesses: Sequence[int]) -> list[int]:
        """Return the target's token for a last guess that is a control token."""
        if not guesses or not self._pair.drafter.is_special(guesses[-1]):
            return []
        return [int(self._pair.tokens.to_target[guesses[-1]])]

    def _text(self, draft_ids: Iterable[int]) -> bytes:
        return b"".join(map(self._pair.drafter.token_bytes, draft_ids))

    def _write(self, data: bytes | bytearray) -> list[int]:
        text, _ = readable(data)
        return self._pair.drafter.encode_within(text) if text else []

    def _settle(self, written: Sequence[int]) -> None:
        """Settle a long tail's first tokens, up to the last word far from its end."""
        tail = self._tail
        if len(tail.data) <= MAX_TAIL_BYTES:
            return
        texts = [self._pair.drafter.token_bytes(i) for i in written]
        ends = [0]
        ends += accumulate(map(len, texts))
        limit = len(tail.data) - KEPT_TAIL_BYTES
        borders = [n for n in range(1, len(texts)) if ends[n] <= limit and tail.data[ends[n]] & 0xC0 != 0x80]
        words = [n for n in borders if texts[n][:1].isspace() and not texts[n - 1][-1:].isspace()]
        last = (words or borders or [0])[-1]  # texts without spaces (Chinese, base64) have no words
        if last and tail.data.startswith(b"".join(texts[:last])):
            tail.settled += last
            del tail.data[: ends[last]]


def whole_text(data: bytes) -> str:
    """Return the text of bytes up to the first that are no whole UTF-8 character."""
    try:
        return codecs.getincrementaldecoder("utf-8")("strict").decode(data)
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def readable(data: bytes | bytearray) -> tuple[str, bytes]:
    """Return the valid UTF-8 of bytes, and an unfinished character at their end."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    return decoder.decode(bytes(data)), decoder.getstate()[0]


# By the name of the option.
RETOKENIZERS: dict[str, Callable[[VocabularyPair], Retokenizer]] = {
    "tokens": TokenRetokenizer,
    "strings": StringRetokenizer,
}
