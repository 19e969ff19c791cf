"""Training data: captured answers as texts, the held-out share, batches, and the draft vocabulary."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import BadModelFile, ConfigError, DrafterMismatch
from paceline.model.files.hf import stored_tensors
from paceline.train.widen import rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy import int64
    from numpy.typing import NDArray

FILE = "answers.jsonl"  # written by serve/terminal/capture.py; train meets the engine through files only
MIN_ANSWER_TOKENS = 3  # shorter answers leave nothing to draft


# Captured answers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CapturedPrompt:
    """A prompt and the target's different answers to it."""

    name: str
    prompt_ids: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]  # token ids of each


def read_answers(folder: Path) -> Iterator[CapturedPrompt]:
    """Yield the complete lines of a folder's answers. Raises `ConfigError` if it is no capture."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield _parse_line(line, f"{path}, line {number}")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}; `paceline train data` writes it") from None


def _parse_line(line: bytes, place: str) -> CapturedPrompt:
    try:
        row = json.loads(line)
        answers = tuple(_checked_ids(answer["token_ids"]) for answer in row["answers"])
        return CapturedPrompt(str(row["id"]), _checked_ids(row["prompt_ids"]), answers)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{place} is no line that `generate --capture` wrote") from None


def _checked_ids(values: list[int]) -> tuple[int, ...]:
    ids = tuple(values)
    if not ids or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise ValueError
    return ids


# Texts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class TrainText:
    """A prompt and one answer to it."""

    name: str  # name of the prompt
    token_ids: NDArray[int64]  # [num_tokens]
    prompt_len: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def answer_len(self) -> int:
        """Number of tokens of the answer."""
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All texts of a folder in file order; more data only adds to the end."""

    texts: tuple[TrainText, ...]
    sha256: str  # hash of the prompts and answers

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompts and answers."""
        return sum(map(len, self.texts))


def read_corpus(folder: Path, vocab_size: int, max_len: int) -> Corpus:
    """Read a folder of captured answers; cut texts at `max_len` tokens.

    Raises `ConfigError` if there are none, or if they hold tokens that the target lacks.
    """
    texts: list[TrainText] = []
    digest = hashlib.sha256()
    for captured in read_answers(folder):
        texts += _texts(captured, max_len)
        digest.update(repr((captured.name, captured.prompt_ids, captured.answers)).encode())
        highest = max(max(ids) for ids in (captured.prompt_ids, *captured.answers))
        if highest >= vocab_size:
            raise ConfigError(
                f"{folder / FILE}: prompt {captured.name!r} has token {highest}, the target knows {vocab_size} "
                "tokens; the data is another model's: name that with --model, or write new data"
            )
    if not texts:
        raise ConfigError(
            f"{folder / FILE} holds no answer of {MIN_ANSWER_TOKENS} tokens that ends within --max-len {max_len}; "
            "`paceline train data` writes answers"
        )
    return Corpus(tuple(texts), digest.hexdigest())


def _texts(captured: CapturedPrompt, max_len: int) -> Iterator[TrainText]:
    prompt_len = len(captured.prompt_ids)
    for answer in captured.answers:
        ids = np.array((captured.prompt_ids + answer)[:max_len], np.int64)
        if len(ids) >= prompt_len + MIN_ANSWER_TOKENS:
            yield TrainText(captured.name, ids, prompt_len)


def held_out(text: TrainText, share: float) -> bool:
    """Return whether a text is held out, together with all texts from its prompt."""
    return rank(text.name) < share * 2**64


def split(texts: Sequence[TrainText], share: float) -> tuple[list[int], list[int]]:
    """Return numbers of training texts and of held-out ones. Raises `ConfigError` if either is empty."""
    parts: tuple[list[int], list[int]] = ([], [])
    for number, text in enumerate(texts):
        parts[held_out(text, share)].append(number)
    if not parts[0] or not parts[1]:
        raise ConfigError(
            f"of {len(texts)} texts {len(parts[0])} would be trained on and {len(parts[1])} held out; both are "
            "needed: gather more data, or change --held-out"
        )
    return parts


def packs(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield batches of at most `budget` tokens; a longer text forms its own batch."""
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
    """Return an epoch's order from seed and epoch alone, so resuming needs no state."""
    return [numbers[i] for i in np.random.default_rng((seed, epoch)).permutation(len(numbers))]


# Vocabulary --------------------------------------------------------------------------------------


def choose_vocabulary(texts: Iterable[TrainText], vocab_size: int, size: int) -> tuple[NDArray[int64], float]:
    """Return the `size` commonest ids of the answers, ascending, and their share of answer tokens.

    If fewer ids occur, the lowest ids fill up, which are the most common in a BPE vocabulary. Raises
    `ConfigError`.
    """
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"--vocab must be between 1 and the target's {vocab_size} tokens, not {size}")
    counts = _counts_of_answers(texts, vocab_size)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    return chosen, float(counts[chosen].sum() / counts.sum())


def vocabulary_of(folder: Path, texts: Iterable[TrainText], vocab_size: int) -> tuple[NDArray[int64], float]:
    """Return the draft vocabulary of a trained drafter, ascending, and its share of answer tokens.

    Raises `ModelError`, also if the drafter has no reduced vocabulary or one of another target.
    """
    stored = stored_tensors(folder).get("d2t")
    if stored is None:
        raise BadModelFile(f"the drafter in {folder} has no vocabulary of its own; say how large with --vocab")
    offsets = stored.read_integers()
    chosen = np.unique(offsets + np.arange(len(offsets)))
    if len(chosen) != len(offsets) or chosen[0] < 0 or chosen[-1] >= vocab_size:
        raise DrafterMismatch(f"the drafter in {folder} does not write the tokens of this target")
    counts = _counts_of_answers(texts, vocab_size)
    return chosen, float(counts[chosen].sum() / counts.sum())


def _counts_of_answers(texts: Iterable[TrainText], vocab_size: int) -> NDArray[int64]:
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.token_ids[text.prompt_len :], minlength=vocab_size)
    return counts


def rarest_token(texts: Iterable[TrainText], vocab_size: int) -> int:
    """Return the id with the fewest occurrences in the texts, the lowest on ties."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.token_ids, minlength=vocab_size)
    return int(np.argmin(counts))
