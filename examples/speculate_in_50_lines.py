"""Coupled speculation for one request, as the engine does it, without pages, rows or batches.

`target` and `drafter` map token ids to logits. Row i of the logits, [vocab], scores what follows token i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.noise import Lane, key, noisy_argmax

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    Model = Callable[[list[int]], np.ndarray]  # [length] token ids -> [length, vocab] logits


def choose(logits: np.ndarray, temperature: float, seed: int, position: int) -> int:
    """Return the next token. Its noise depends on seed, position and token id only."""
    if temperature == 0:
        return int(logits.argmax())
    return noisy_argmax(logits / temperature, key(seed, 0, Lane.CHOICE, position))


def speculate(
    target: Model, drafter: Model, prompt: list[int], num_tokens: int, k: int, temperature: float, seed: int
) -> list[int]:
    """Return `num_tokens` tokens that continue the prompt. The drafter changes the speed, never the text."""
    text = list(prompt)
    while len(text) < len(prompt) + num_tokens:
        draft = list(text)
        for _ in range(k):  # propose
            draft.append(choose(drafter(draft)[-1], temperature, seed, len(draft)))
        logits = target(draft)  # score: one pass over the text and all k drafts
        for position in range(len(text), len(draft) + 1):  # judge
            chosen = choose(logits[position - 1], temperature, seed, position)
            text.append(chosen)  # commit: always the target's own choice, never the draft
            if position == len(draft) or draft[position] != chosen:
                break
    return text[len(prompt) : len(prompt) + num_tokens]
