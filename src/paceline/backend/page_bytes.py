"""Protocol of stores of keys and values whose pages can leave them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paceline.backend.seam import KV

if TYPE_CHECKING:
    from numpy import uint8
    from numpy.typing import NDArray


class PageBytes(KV, Protocol):
    """Keys and values whose pages can be taken out as bytes and put back later.

    A store of the same model, types and build takes them. Any thread may call it, beside passes that touch other
    pages.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        ...

    def read_page(self, page: int, to: NDArray[uint8]) -> None:
        """Copy a page's bytes out, [page_bytes]."""
        ...

    def write_page(self, page: int, data: NDArray[uint8]) -> None:
        """Copy a page's bytes in, [page_bytes]."""
        ...
