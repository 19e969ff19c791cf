"""The draft vocabulary: the tokens that the target writes most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import BadModelFile, ConfigError, DrafterMismatch
from paceline.model.files.hf import stored_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.train.corpus import Text


def choose_vocabulary(texts: Iterable[Text], vocab_size: int, size: int) -> tuple[NDArray[int64], float]:
    """Return the `size` most frequent ids of the answers, ascending, and the share of answer tokens they cover.

    Where fewer are seen, the lowest ids fill up: in a BPE vocabulary the commonest. Raises `ConfigError`.
    """
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"--vocab must be between 1 and the target's {vocab_size} tokens, not {size}")
    counts = _counts_of_answers(texts, vocab_size)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    return chosen, float(counts[chosen].sum() / counts.sum())


def vocabulary_of(folder: Path, texts: Iterable[Text], vocab_size: int) -> tuple[NDArray[int64], float]:
    """Return the ids that a trained drafter writes, ascending, and the share of answer tokens they cover.

    Raises `ModelError`, also where it writes them all, or others than the target has.
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


def _counts_of_answers(texts: Iterable[Text], vocab_size: int) -> NDArray[int64]:
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.token_ids[text.prompt_len :], minlength=vocab_size)
    return counts


def rarest_token(texts: Iterable[Text], vocab_size: int) -> int:
    """Return the lowest of the ids that the texts have least, which is none at all where a token is unused."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.token_ids, minlength=vocab_size)
    return int(np.argmin(counts))
