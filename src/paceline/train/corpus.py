"""What a head learns from: captured answers as texts, some of them held out, packed into batches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import ConfigError
from paceline.train.answers import FILE, read_answers
from paceline.train.widen import origin

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.train.answers import Captured

LEAST_ANSWER = 3  # tokens; below that there is nothing to draft


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A prompt and one answer to it."""

    name: str  # of the prompt
    token_ids: NDArray[int64]  # [num_tokens]
    prompt_len: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def answer_len(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All texts of a folder, in the order of the file, so that more data only adds to the end."""

    texts: tuple[Text, ...]
    sha256: str  # of what was read

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and answers."""
        return sum(map(len, self.texts))


def read_corpus(folder: Path, vocab_size: int, max_len: int) -> Corpus:
    """Read a folder of captured answers; texts are cut at `max_len` tokens.

    Raises `ConfigError` if nothing is there, or tokens that the target does not have.
    """
    texts: list[Text] = []
    digest = hashlib.sha256()
    for captured in read_answers(folder):
        texts += _texts(captured, max_len)
        digest.update(repr((captured.name, captured.prompt_ids, captured.answers)).encode())
        most = max(max(ids) for ids in (captured.prompt_ids, *captured.answers))
        if most >= vocab_size:
            raise ConfigError(
                f"{folder / FILE}: prompt {captured.name!r} has token {most}, the target knows {vocab_size} "
                "tokens; the data is another model's: name that with --model, or write new data"
            )
    if not texts:
        raise ConfigError(
            f"{folder / FILE} holds no answer of {LEAST_ANSWER} tokens that ends within --max-len {max_len}; "
            "`paceline train data` writes answers"
        )
    return Corpus(tuple(texts), digest.hexdigest())


def _texts(captured: Captured, max_len: int) -> Iterator[Text]:
    prompt_len = len(captured.prompt_ids)
    for answer in captured.answers:
        ids = np.array((captured.prompt_ids + answer)[:max_len], np.int64)
        if len(ids) >= prompt_len + LEAST_ANSWER:
            yield Text(captured.name, ids, prompt_len)


def held_out(text: Text, share: float) -> bool:
    """Whether a text is kept from training: by its first prompt, so that what was made from it goes along."""
    head = hashlib.sha256(origin(text.name).encode()).digest()[:8]
    return int.from_bytes(head, "big") < share * 2**64


def split(texts: Sequence[Text], share: float) -> tuple[list[int], list[int]]:
    """Return the numbers of the texts to train on, and of those held out. Raises `ConfigError` if one is empty."""
    kept: tuple[list[int], list[int]] = ([], [])
    for number, text in enumerate(texts):
        kept[held_out(text, share)].append(number)
    if not kept[0] or not kept[1]:
        raise ConfigError(
            f"of {len(texts)} texts {len(kept[0])} would be trained on and {len(kept[1])} held out; both are "
            "needed: gather more data, or change --held-out"
        )
    return kept


def packs(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield texts in batches of at most `budget` tokens; a longer text is a batch of its own."""
    pack: list[int] = []
    size = 0
    for number in order:
        if pack and size + lengths[number] > budget:
            yield pack
            pack, size = [], 0
        pack.append(number)
        size += lengths[number]
    if pack:
        yield pack


def shuffled(numbers: Sequence[int], seed: int, epoch: int) -> list[int]:
    """Return the order of one epoch: a function of seed and epoch alone, so that resuming needs no state."""
    return [numbers[i] for i in np.random.default_rng((seed, epoch)).permutation(len(numbers))]
