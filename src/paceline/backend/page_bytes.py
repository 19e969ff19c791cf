"""Stores of keys and values whose pages can be moved or dropped; bytes of pages."""

from __future__ import annotations

from dataclasses import dataclass
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

    def read_page(self, page: int, to: NDArray[uint8]) -> None:
        """Copy a page's bytes out, [page_bytes]."""

    def write_page(self, page: int, data: NDArray[uint8]) -> None:
        """Copy a page's bytes in, [page_bytes]."""


class DropsWindows(KV, Protocol):
    """Keys and values of sliding layers and others, see `ModelConfig.sliding_kv`."""

    @property
    def window_bytes_per_token(self) -> int:
        """Bytes that one token takes in sliding layers."""

    def drop_window(self, page: int) -> None:
        """Give back the memory that sliding layers take for a page, until it is written.

        Passes may run that read other pages.
        """

    def drop_rest(self, page: int) -> None:
        """Give back the memory that the other layers take for a page, likewise."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of a store, and what its pages take of it, in bytes."""

    page: int  # bytes of a page without its window part
    part: int  # bytes of a window part
    total: int

    @property
    def whole(self) -> int:
        """Bytes of a page with its window part."""
        return self.page + self.part

    def of_row(self, num_pages: int, most_parts: int) -> int:
        """Return the bytes that a row takes. most_parts: its window parts, at most."""
        return num_pages * self.page + min(num_pages, most_parts) * self.part
