"""A drafter's choice among tokens of its own, by the ids that the target knows them by.

Noise, penalties and bias go by the target's ids, so that draft and target agree as often as their distributions
allow. Tokens that only the drafter has stand behind the target's, at the target's vocabulary size plus their id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.backend.sampling import logit_rows
from paceline.backend.seam import Capabilities, Deferred, PassResult
from paceline.core.nouns import BROKEN, UNCHOSEN, SamplingSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.backend.seam import KV, Decoder, PassRequest, Pending
    from paceline.core.nouns import ChooseKind
    from paceline.draft.drafter import Vocabulary
    from paceline.draft.model.vocabulary import TokenMap

GREEDY_KIND: ChooseKind = "argmax"


@dataclass(frozen=True, slots=True, eq=False)
class IdMap:
    """Ids by which the target knows a drafter's tokens."""

    draft_ids: NDArray[int64]  # [n] the drafter's ids that may be chosen
    target_ids: NDArray[int64]  # [n] the target's id of each, or one behind its vocabulary; ascending
    width: int  # above all target ids

    def draft_id(self, target_id: int) -> int:
        """Return the drafter's id of a token that was chosen."""
        return int(self.draft_ids[self.target_ids.searchsorted(target_id)])

    def choose(self, logits: NDArray[floating], specs: Sequence[SamplingSpec]) -> PassResult:
        """Choose a target id for each row of the drafter's logits [n, its vocabulary]; see `PassResult`.

        Rows that are not chosen by their largest logit alone come back spread over the target ids.
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
    """Return the ids of the drafter's tokens whose text begins with `before`, known by the text behind it."""
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
    return _of(ids, size + drafter.size)


def _of(ids: Mapping[int, int], width: int) -> IdMap:
    return _sorted(np.array([*ids], np.int64), np.array([*ids.values()], np.int64), width)


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
