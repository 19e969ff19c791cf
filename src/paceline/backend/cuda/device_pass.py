"""One pass as tensors on its device, as kernels read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.nouns import PAGE_TOKENS, noun

if TYPE_CHECKING:
    from numpy import generic
    from numpy.typing import NDArray

    from paceline.backend.seam import Packed


@noun
class DevicePass:
    """Tokens of one pass on a device, all int64 and perhaps padded. See `Packed`.

    Tokens from `cu_len[-1]` on are padding: token 0 at position 0, in a slot of the store's scratch page. Rows
    without tokens are padding, too, and so are wanted places behind the last real one, which name token 0. Nothing
    that padding writes reaches a real row.
    """

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    slots: torch.Tensor  # [num_tokens]
    cu_len: torch.Tensor  # [num_rows + 1]
    pages: torch.Tensor  # [num_rows, max_pages]
    wanted: torch.Tensor  # [num_wanted]
    first_keys: torch.Tensor | None = None  # [num_rows]; None: all 0
    last_keys: torch.Tensor | None = None  # [num_tokens] last key that a token sees; None: `positions`

    @property
    def seen_to(self) -> torch.Tensor:
        """Position of the last key that each token sees. [num_tokens]"""
        return self.positions if self.last_keys is None else self.last_keys

    @property
    def max_keys(self) -> int:
        """Upper bound of the keys of any row, known to the host."""
        return self.pages.shape[1] * PAGE_TOKENS


def upload(packed: Packed, device: torch.device) -> DevicePass:
    """Return a host's pass on a device."""

    def on_device(array: NDArray[generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return DevicePass(
        token_ids=on_device(packed.token_ids),
        positions=on_device(packed.positions),
        slots=on_device(packed.slots),
        cu_len=on_device(packed.cu_len),
        pages=on_device(packed.pages),
        wanted=on_device(packed.wanted),
        first_keys=None if packed.first_keys is None else on_device(packed.first_keys),
    )
