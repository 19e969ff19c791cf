"""Two vocabularies: tokens that mean the same, and a drafter's choice by target ids.

Noise, penalties and bias go by the target's ids, so that draft and target agree as often as their distributions
allow. Tokens that only the drafter has stand behind the target's, at the target's vocabulary size plus their id.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.backend.sampling import logit_rows
from paceline.backend.seam import Capabilities, PassResult
from paceline.backend.target import Deferred
from paceline.core.nouns import BROKEN, UNCHOSEN, SamplingSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.backend.seam import KV, Decoder, PassRequest, Pending
    from paceline.core.nouns import ChooseKind
    from paceline.draft.drafter import Vocabulary
    from paceline.model.tokenizer import Tokenizer

GREEDY_KIND: ChooseKind = "argmax"


def difference(target: Vocabulary, drafter: Vocabulary) -> str | None:
    """Return the first difference of two tokenizers, None if every id means the same.

    Sizes of the embeddings may differ by padding, as 151936 and 152064 do among Qwen models.
    """
    if target.tokenizer.pieces is drafter.tokenizer.pieces:  # one tokenizer
        return None
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
    """Tokens of two vocabularies with the same bytes or the same role at text ends."""

    to_target: NDArray[int64]  # [rows of the drafter's embedding] the target's id, -1 where there is none
    to_drafter: NDArray[int64]  # [rows of the target's embedding] the drafter's id, -1 where there is none
    target_ids: Mapping[bytes, int]  # of the target's tokens by their text
    share: float  # of the target's tokens that the drafter has too, control tokens left out
    is_total: bool  # every token of the target is one of the drafter's


def map_tokens(target: Vocabulary, drafter: Vocabulary) -> TokenMap:
    """Compare two vocabularies, text by text."""
    ours, theirs = target.tokenizer, drafter.tokenizer
    ids, draft_ids = by_text(ours), by_text(theirs)
    to_target, to_drafter = np.full(drafter.size, -1, np.int64), np.full(target.size, -1, np.int64)
    for text, draft_id in draft_ids.items():
        to_target[draft_id] = ids.get(text, -1)
    texts = [token_id for token_id in range(ours.vocab_size) if _is_text(ours, token_id)]
    for token_id in texts:  # also tokens for whose text `ids` has another token
        to_drafter[token_id] = draft_ids.get(ours.token_bytes(token_id), -1)
    share = float((to_drafter[texts] >= 0).mean()) if texts else 0.0
    for token_id, draft_id in _same_roles(ours, theirs):
        to_drafter[token_id], to_target[draft_id] = draft_id, token_id
    return TokenMap(to_target, to_drafter, ids, share, bool((to_drafter[: ours.vocab_size] >= 0).all()))


def by_text(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Return token ids by text; of several, the one that the tokenizer itself writes."""
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
    """Return the tokens that begin a text, then those that end one; both may coincide."""
    begin = [] if ours.bos_id is None or theirs.bos_id is None else [(ours.bos_id, theirs.bos_id)]
    return begin + list(zip(ours.eos_ids[:1], theirs.eos_ids[:1], strict=False))


# Choice --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class IdMap:
    """Ids by which the target knows a drafter's tokens."""

    draft_ids: NDArray[int64]  # [n] the drafter's ids that may be chosen
    target_ids: NDArray[int64]  # [n] the target's id of each, or an id behind its vocabulary; ascending
    width: int  # above all `target_ids`

    def draft_id(self, target_id: int) -> int:
        """Return the drafter's id of a token that was chosen."""
        return int(self.draft_ids[self.target_ids.searchsorted(target_id)])

    def choose(self, logits: NDArray[floating], specs: Sequence[SamplingSpec]) -> PassResult:
        """Choose a target id per row of drafter logits [n, drafter vocabulary]; see `PassResult`.

        For rows that need more than the largest logit, logits come back, spread over the target ids.
        """
        found = logits[:, self.draft_ids]
        plain = np.array([c.kind == GREEDY_KIND for c in specs], bool)
        best = self.target_ids[found.argmax(axis=1)]
        finite = np.isfinite(found.max(axis=1))
        token_ids = np.where(plain, np.where(finite, best, BROKEN), UNCHOSEN)
        if plain.all():
            return PassResult(token_ids)
        spread = np.full((int((~plain).sum()), self.width), -np.inf, logits.dtype)
        spread[:, self.target_ids] = found[~plain]
        asked = [c._replace(kind=GREEDY_KIND if p else "logits") for c, p in zip(specs, plain, strict=True)]
        return PassResult(token_ids, spread, logit_rows(asked))


def shared_ids(tokens: TokenMap) -> IdMap:
    """Return the ids of the tokens that both vocabularies have."""
    draft_ids = np.flatnonzero(tokens.to_target >= 0)
    return _sorted(draft_ids, tokens.to_target[draft_ids], len(tokens.to_drafter))


def all_ids(tokens: TokenMap, drafter: Vocabulary, before: bytes = b"") -> IdMap:
    """Return the ids of drafter's tokens that begin with `before`, by the text behind it."""
    known, size = drafter.tokenizer, len(tokens.to_drafter)
    ids: dict[int, int] = {}  # target ids by draft id
    for draft_id in range(known.vocab_size):
        text = b"" if known.is_special(draft_id) else known.token_bytes(draft_id)
        if not before and (known.is_special(draft_id) or text):
            target_id = int(tokens.to_target[draft_id])
        elif before and text.startswith(before):
            target_id = tokens.target_ids.get(text[len(before) :], -1)
        else:
            continue
        ids[draft_id] = size + draft_id if target_id < 0 else target_id
    return _sorted(np.array([*ids], np.int64), np.array([*ids.values()], np.int64), size + drafter.size)


def _sorted(draft_ids: NDArray[int64], target_ids: NDArray[int64], width: int) -> IdMap:
    order = np.argsort(target_ids, kind="stable")
    return IdMap(draft_ids[order], target_ids[order], width)


class TranslatedDecoder:
    """A drafter's decoder that chooses among the target's ids: both texts have the same borders.

    Its requests are packed with `read_as`. It runs one step at a time: ids are translated between two.
    """

    capabilities = Capabilities()

    def __init__(self, decoder: Decoder, tokens: TokenMap) -> None:
        """tokens: a total map. Ids of padding rows are read as the drafter's first token."""
        assert tokens.is_total
        self.name, self.config = decoder.name, decoder.config
        self.read_as = tokens.to_drafter.clip(0)  # [vocab] the drafter's ids
        self._decoder = decoder
        self._id_map = shared_ids(tokens)

    def describe(self) -> str:
        """Return what it is, for the user."""
        return self._decoder.describe()

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory."""
        return self._decoder.weight_bytes

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> KV:
        """Return an empty store, see `Decoder`."""
        return self._decoder.new_kv(num_pages, num_layers)

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass over the drafter's ids that chooses among the target's."""
        specs = [spec._replace(kind="logits") for spec in request.specs]
        pending = self._decoder.launch(replace(request, specs=specs, vocab_size=None))

        def choose() -> PassResult:
            result = pending.wait()
            return result if result.logits is None else self._id_map.choose(result.logits, request.specs)

        return Deferred(choose)
