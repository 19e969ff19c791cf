"""Draft models whose tokenizer is not that of `tests/tiny.py`: the tiny target again, under other token ids."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from paceline.draft.drafter import Vocabulary
from paceline.model.tokenizer import Tokenizer
from tests.tiny import END, MERGES, tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

STOP = "<|stop|>"  # the drafter's own word for the end of text
FEWER = [("a", "n"), ("Ġ", "an"), ("t", "h"), ("i", "n"), ("th", "in")]


def _tokenizer(words: list[str], merges: list[tuple[str, str]], end: str) -> Tokenizer:
    raw = RawTokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([end])
    return Tokenizer(raw, eos_ids=(len(words),))


@cache
def renumbered() -> Tokenizer:
    """Every token of the target's, with another id."""
    raw = tiny_tokenizer().raw
    words = [raw.id_to_token(i) for i in range(318, -1, -1)]
    return _tokenizer(words, MERGES, END)


@cache
def other() -> Tokenizer:
    """A tokenizer with other merges, no padding words and another end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _tokenizer([*alphabet[::-1], *("".join(pair) for pair in FEWER)], FEWER, STOP)


TOKENIZERS = {"renumbered": renumbered, "other": other}


def foreign_weights(name: str, weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Vocabulary]:
    """The target's weights, each token's embedding at the place where the named tokenizer has it."""
    ours, theirs = tiny_tokenizer(), TOKENIZERS[name]()
    ids = {ours.token_bytes(i): i for i in range(319)} | {STOP.encode(): 319, END.encode(): 319}
    rows = [ids.get(theirs.token_bytes(i), 318) for i in range(theirs.vocab_size)]
    return dict(weights) | {"embed": weights["embed"][rows]}, Vocabulary(name, theirs, theirs.vocab_size)
