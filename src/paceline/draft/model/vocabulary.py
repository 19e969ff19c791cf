"""Do two models mean the same by a token id? And if not, which tokens have the same text?"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.draft.drafter import Vocabulary
    from paceline.model.tokenizer import Tokenizer


def difference(target: Vocabulary, drafter: Vocabulary) -> str | None:
    """Return the first thing that the tokenizers spell otherwise, None if every id means the same to both.

    Sizes of the embeddings may differ by padding, as 151936 and 152064 do among Qwen models.
    """
    sizes = target.tokenizer.vocab_size, drafter.tokenizer.vocab_size
    if sizes[0] != sizes[1]:
        return f"their tokenizers know {sizes[1]} and {sizes[0]} tokens"
    for token_id in range(sizes[0]):
        spelled = target.tokenizer.token_bytes(token_id), drafter.tokenizer.token_bytes(token_id)
        if spelled[0] != spelled[1]:
            return f"token {token_id} is {spelled[1]!r} to the drafter and {spelled[0]!r} to the target"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class TokenMap:
    """Which tokens of two vocabularies stand for the same: the same bytes, or the begin or end of a text."""

    to_target: NDArray[int64]  # [rows of the drafter's embedding] the target's id, -1 where there is none
    to_drafter: NDArray[int64]  # [rows of the target's embedding] the drafter's id, -1 where there is none
    target_ids: Mapping[bytes, int]  # of the target's tokens by their text
    share: float  # of the target's tokens that the drafter has too, steering ones left out
    is_total: bool  # every token of the target is one of the drafter's


def map_tokens(target: Vocabulary, drafter: Vocabulary) -> TokenMap:
    """Compare two vocabularies, text by text."""
    ours, theirs = target.tokenizer, drafter.tokenizer
    ids, draft_ids = by_text(ours), by_text(theirs)
    to_target, to_drafter = np.full(drafter.size, -1, np.int64), np.full(target.size, -1, np.int64)
    for text, draft_id in draft_ids.items():
        to_target[draft_id] = ids.get(text, -1)
    texts = [token_id for token_id in range(ours.vocab_size) if _is_text(ours, token_id)]
    for token_id in texts:  # also those whose text another token of the target is known by
        to_drafter[token_id] = draft_ids.get(ours.token_bytes(token_id), -1)
    share = float((to_drafter[texts] >= 0).mean()) if texts else 0.0
    for token_id, draft_id in _same_roles(ours, theirs):
        to_drafter[token_id], to_target[draft_id] = draft_id, token_id
    return TokenMap(to_target, to_drafter, ids, share, bool((to_drafter[: ours.vocab_size] >= 0).all()))


def by_text(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Return a token's id by its text; of several with one text, that which the tokenizer itself writes."""
    known: dict[bytes, list[int]] = defaultdict(list)
    for token_id in range(tokenizer.vocab_size):
        if _is_text(tokenizer, token_id):
            known[tokenizer.token_bytes(token_id)].append(token_id)
    return {text: ids[0] if len(ids) == 1 else _usual(tokenizer, text, ids) for text, ids in known.items()}


def _usual(tokenizer: Tokenizer, text: bytes, ids: Sequence[int]) -> int:
    written = tokenizer.encode_within(text.decode("utf-8", "ignore"))
    return written[0] if len(written) == 1 and written[0] in ids else ids[-1]  # bytes come first in a vocabulary


def _is_text(tokenizer: Tokenizer, token_id: int) -> bool:
    return not tokenizer.is_special(token_id) and bool(tokenizer.token_bytes(token_id))


def _same_roles(ours: Tokenizer, theirs: Tokenizer) -> list[tuple[int, int]]:
    """Return the tokens that begin a text, then those that end one: a drafter may have one for both."""
    begin = [] if ours.bos_id is None or theirs.bos_id is None else [(ours.bos_id, theirs.bos_id)]
    return begin + list(zip(ours.eos_ids[:1], theirs.eos_ids[:1], strict=False))
