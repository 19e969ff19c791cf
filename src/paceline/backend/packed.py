"""The tokens of one pass, packed: one after another without padding. What a decoder reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.nouns import noun

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray


@noun
class Packed:
    """Token rows of one pass with, for each token, its place in the text and in the KV store.

    Row i of the pass owns tokens cu_len[i]:cu_len[i + 1], at consecutive positions. Token t attends to its row's
    slots at positions first_keys[i]..positions[t], its own included: K and V are written before they are read.
    The slot of a position p of row i is `pages[i, p // 16] * 16 + p % 16`.
    """

    token_ids: NDArray[int64]  # [num_tokens]
    positions: NDArray[int64]  # [num_tokens] place in the text, for RoPE and the causal mask
    slots: NDArray[int64]  # [num_tokens] where K and V are written
    cu_len: NDArray[int64]  # [num_rows + 1]
    pages: NDArray[int64]  # [num_rows, max_pages] page ids, padded with 0
    wanted: NDArray[int64]  # [num_wanted] indices of the tokens whose hidden state is returned
    first_keys: NDArray[int64] | None = None  # [num_rows] position of the first key that a row sees; None: all 0

    def check(self, num_slots: int, vocab_size: int) -> None:
        """Assert shapes and ranges."""
        num_tokens = len(self.token_ids)
        assert self.cu_len[0] == 0
        assert self.cu_len[-1] == num_tokens == len(self.positions) == len(self.slots)
        assert len(self.pages) == len(self.cu_len) - 1
        assert ((0 <= self.token_ids) & (self.token_ids < vocab_size)).all()
        assert ((0 <= self.slots) & (self.slots < num_slots)).all()
        assert ((0 <= self.wanted) & (self.wanted < num_tokens)).all()
