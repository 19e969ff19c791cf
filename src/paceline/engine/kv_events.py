"""Events of the prefix cache, in the fields of vLLM's KV events.

They tell which pages a request can find. A router that applies them knows all hashes that the page pool finds.
vLLM's word for a page is *block*.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from paceline.core.request_nouns import Request

MEDIUM = "GPU"  # vLLM's name for the memory that passes read, whatever the device is
HASH_BYTES = 8  # told bytes of a page's SHA-256: vLLM tells 64 bits of its hashes, too


class PageChain(Protocol):
    """A text with the hashes of its pages, as `RequestState` is."""

    request: Request
    hashes: list[bytes]  # the root, then one for each full page
    token_ids: list[int]


class BlockStored(Struct, tag=True, omit_defaults=True):
    """Consecutive pages of a text that can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # None: the first page begins the text
    token_ids: list[int]  # [len(block_hashes) * block_size]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str]] | None = None  # under a salt: for each page a digest of the salt


class BlockRemoved(Struct, tag=True, omit_defaults=True):
    """Pages that requests cannot find any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Struct, tag=True):
    """The prefix cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def told_hash(page_hash: bytes) -> int:
    """Return the 64 bits of a page's hash that events carry."""
    return int.from_bytes(page_hash[:HASH_BYTES], "big")


def page_event(page_hash: bytes, chain: PageChain, index: int) -> BlockStored:
    """Return the event of a text's page, alone."""
    told, parent = told_hash(page_hash), told_hash(chain.hashes[index]) if index else None
    token_ids = chain.token_ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
    salted = [[chain.hashes[0][:HASH_BYTES].hex()]] if chain.request.salt else None
    return BlockStored([told], parent, token_ids, PAGE_TOKENS, None, MEDIUM, None, salted)


class KvEventLog:
    """Events of a page pool in their order, until they are taken."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def stored(self, page_hash: bytes, chain: PageChain, index: int) -> None:
        """Note that a text's page can be found."""
        self.put(page_event(page_hash, chain, index))

    def put(self, event: BlockStored) -> None:
        """Add a page's own event, which is changed: events of consecutive pages are merged."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == event.parent_block_hash:
            last.block_hashes += event.block_hashes
            last.token_ids += event.token_ids
            if last.extra_keys is not None and event.extra_keys is not None:  # both have the salt of that parent
                last.extra_keys += event.extra_keys
        else:
            self._events.append(event)

    def removed(self, page_hash: bytes) -> None:
        """Note that a page cannot be found any more."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(told_hash(page_hash))
        else:
            self._events.append(BlockRemoved([told_hash(page_hash)], MEDIUM))

    def cleared(self) -> None:
        """Note that no page can be found; earlier events do not matter then."""
        self._events = [AllBlocksCleared()]

    @property
    def waits(self) -> bool:
        """True if there are events to be taken."""
        return bool(self._events)

    def take(self) -> list[KvEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
