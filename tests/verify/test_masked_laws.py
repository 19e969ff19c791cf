"""Laws under masks: texts follow the masked target, also where drafts leave the grammar or are cut there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy import special

from paceline.core import noise
from paceline.verify.law import LAWS, load_law
from tests.verify import world as w

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.nouns import RowDraft, SamplingSpec, Scores

RIGHT = 1e-4
ALLOWED = np.array([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 0]], bool)  # after each last token


@dataclass(frozen=True)
class MaskedWorld(w.World):
    """A target under a grammar of one token's memory."""

    def p(self, last: int) -> np.ndarray:
        return special.softmax(np.where(ALLOWED[last], self.target[last], -np.inf))

    def scores(
        self, last: int, drafted: RowDraft, choose: SamplingSpec, position_of: Callable[[int], int] = int
    ) -> Scores:
        plain = super().scores(last, drafted, choose, position_of)
        left, specs, context = False, [], [last, *drafted.token_ids]
        for index, (token, spec) in enumerate(zip(context, plain.specs, strict=True)):
            left = left or (index > 0 and not ALLOWED[context[index - 1], token])
            bits = np.full(32, 1, np.uint8) if left else np.pad(ALLOWED[token].astype(np.uint8), (0, 28))
            specs.append(spec._replace(mask=np.packbits(bits, bitorder="little").view(np.int32)))
        return replace(plain, specs=specs)


@pytest.mark.parametrize("law", sorted(LAWS))
def test_texts_follow_the_masked_target(law: str) -> None:
    """Drafts are drawn without the mask, so some leave the grammar."""
    drafter = w.draws(noise.Lane.DRAFT)
    world = MaskedWorld(**vars(w.World.random(3, distance=0.9)))
    texts = [w.write(world, load_law(law), drafter, seed, 3)[0] for seed in range(2500)]
    for text in texts[:200]:
        assert all(ALLOWED[a, b] for a, b in zip((0, *text), text, strict=False))
    assert w.fit(world, texts, 3) > RIGHT


def test_coupled_writes_the_same_text_where_drafts_are_cut() -> None:
    world = MaskedWorld(**vars(w.World.random(4)))
    for seed in range(200):
        plain = w.write(world, load_law("coupled"), w.drafts_nothing, seed, 6)[0][:6]
        whole = w.write(world, load_law("coupled"), w.draws(noise.Lane.CHOICE), seed, 6)[0][:6]
        assert whole == plain
