"""A drafter's choice among tokens of its own, by the ids that the target knows them by.

Noise, penalties and bias go by the target's ids, so that draft and target agree as often as their distributions
allow. Tokens that only the drafter has stand behind the target's, at the target's vocabulary size plus their id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.backend.sampling import logit_rows
from paceline.backend.seam import SampledTokens
from paceline.core.nouns import BROKEN, UNCHOSEN, SamplingSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.backend.packed import Packed
    from paceline.backend.seam import KV, Decoder
    from paceline.core.nouns import ChooseKind
    from paceline.draft.drafter import Vocabulary
    from paceline.draft.model.vocabulary import TokenMap

GREEDY_KIND: ChooseKind = "argmax"


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the drafter's tokens stand."""

    kept: NDArray[int64]  # [n] the drafter's ids that may be chosen
    places: NDArray[int64]  # [n] the place of each, ascending
    width: int  # places there are

    def own_id(self, place: int) -> int:
        """Return the drafter's id of a place that was chosen."""
        return int(self.kept[self.places.searchsorted(place)])

    def choose(self, logits: NDArray[floating], specs: Sequence[SamplingSpec]) -> SampledTokens:
        """Choose a place for each row of the drafter's logits [n, its vocabulary]; see `SampledTokens`.

        Rows that are not chosen by their largest logit alone come back spread over the places.
        """
        found = logits[:, self.kept]
        plain = np.array([c.kind == GREEDY_KIND for c in specs], bool)
        best = self.places[found.argmax(axis=1)]
        finite = np.isfinite(found.max(axis=1))
        token_ids = np.where(plain, np.where(finite, best, BROKEN), UNCHOSEN)
        if plain.all():
            return SampledTokens(token_ids, None, None)
        spread = np.full((int((~plain).sum()), self.width), -np.inf, logits.dtype)
        spread[:, self.places] = found[~plain]
        asked = [c._replace(kind=GREEDY_KIND if p else "logits") for c, p in zip(specs, plain, strict=True)]
        return SampledTokens(token_ids, spread, logit_rows(asked))


def shared_places(tokens: TokenMap) -> Places:
    """Return the places of the tokens that both vocabularies have."""
    kept = np.flatnonzero(tokens.to_target >= 0)
    return _sorted(kept, tokens.to_target[kept], len(tokens.to_drafter))


def all_places(tokens: TokenMap, drafter: Vocabulary, before: bytes = b"") -> Places:
    """Return the places of the drafter's tokens whose text begins with `before`, known by what is behind it."""
    known, size = drafter.tokenizer, len(tokens.to_drafter)
    places: dict[int, int] = {}
    for draft_id in range(known.vocab_size):
        text = b"" if known.is_special(draft_id) else known.token_bytes(draft_id)
        if not before and (known.is_special(draft_id) or text):
            place = int(tokens.to_target[draft_id])
        elif before and text.startswith(before):
            place = tokens.target_ids.get(text[len(before) :], -1)
        else:
            continue
        places[draft_id] = size + draft_id if place < 0 else place
    return _unique(places, size + drafter.size)


def _unique(places: Mapping[int, int], width: int) -> Places:
    return _sorted(np.array([*places], np.int64), np.array([*places.values()], np.int64), width)


def _sorted(kept: NDArray[int64], places: NDArray[int64], width: int) -> Places:
    order = np.argsort(places, kind="stable")
    return Places(kept[order], places[order], width)


class TranslatedDecoder:
    """A drafter's decoder to which every token is known by the target's id: both texts have the same borders."""

    beside = None  # who drafts waits for it
    in_turn = None  # ids are translated between two passes

    def __init__(self, decoder: Decoder, tokens: TokenMap) -> None:
        """tokens: a total map. Ids of padding rows are read as the drafter's first token."""
        assert tokens.is_total
        self.name, self.config = decoder.name, decoder.config
        self._decoder = decoder
        self._read = tokens.to_drafter.clip(0)
        self._places = shared_places(tokens)

    def describe(self) -> str:
        """Return what it is, for the user."""
        return self._decoder.describe()

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory."""
        return self._decoder.weight_bytes

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> KV:
        """Return an empty store, see `backend.Decoder`."""
        return self._decoder.new_kv(num_pages, num_layers)

    def run(
        self,
        packed: Packed,
        kv: KV,
        specs: Sequence[SamplingSpec],
        *,
        num_layers: int | None = None,
        vocab_size: int | None = None,
        taps: Sequence[int] = (),
    ) -> SampledTokens:
        """Run a pass and choose among the target's ids, see `backend.Decoder`."""
        read = replace(packed, token_ids=self._read[packed.token_ids])
        wanted = [c._replace(kind="logits") for c in specs]
        found = self._decoder.run(read, kv, wanted, num_layers=num_layers, taps=taps)
        return found if found.logits is None else self._places.choose(found.logits, specs)
