"""A router's index of one engine, from KV events as vLLM defines them; written from its structs' fields.

Each class has the fields of vLLM's struct of that name, in its order, once as a map and once as an array.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

PAGE = 16


class StoredMap(Struct, tag="BlockStored", forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedMap(Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class ClearedMap(Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


class StoredArray(Struct, tag="BlockStored", array_like=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class RemovedArray(Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int]
    medium: str | None


class ClearedArray(Struct, tag="AllBlocksCleared", array_like=True):
    pass


class MapBatch(Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[StoredMap | RemovedMap | ClearedMap]
    data_parallel_rank: int | None = None


class ArrayBatch(Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


class KvIndex:
    """Pages that an engine has told of and not taken back."""

    def __init__(self, batch: type[MapBatch | ArrayBatch] = MapBatch) -> None:
        self._decode = msgspec.msgpack.Decoder(batch).decode
        self.pages: set[int] = set()
        self.texts: dict[int, tuple[str, tuple[int, ...]]] = {}  # of each hash ever told: salt mark, tokens
        self.rank: int | None = None
        self.clears = 0

    def apply(self, payload: bytes) -> None:
        """Take in a batch."""
        batch = self._decode(payload)
        self.rank = batch.data_parallel_rank
        for event in batch.events:
            if isinstance(event, StoredMap | StoredArray):
                self._store(event)
            elif isinstance(event, RemovedMap | RemovedArray):
                assert self.pages.issuperset(event.block_hashes), "a page is taken back that was not there"
                self.pages.difference_update(event.block_hashes)
            else:
                self.clears += 1
                self.pages.clear()

    def _store(self, event: StoredMap | StoredArray) -> None:
        assert (event.block_size, event.lora_id, event.lora_name, event.medium) == (PAGE, None, None, "GPU")
        assert len(event.token_ids) == PAGE * len(event.block_hashes)
        keys = event.extra_keys or [None] * len(event.block_hashes)
        _, text = self.texts[event.parent_block_hash] if event.parent_block_hash is not None else ("", ())
        for index, (told, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
            assert told not in self.pages, "a page is told of twice"
            text += tuple(event.token_ids[index * PAGE : (index + 1) * PAGE])
            self.pages.add(told)
            self.texts[told] = (key[0] if key else "", text)

    def cached_len(self, token_ids: tuple[int, ...], mark: str = "") -> int:
        """Return how many leading tokens of a prompt the engine will find; the last one is computed."""
        known = {self.texts[told] for told in self.pages}
        length = 0
        while length + PAGE < len(token_ids) and (mark, token_ids[: length + PAGE]) in known:
            length += PAGE
        return length
