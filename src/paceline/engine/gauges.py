"""Gauges: sizes of what an engine holds now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Gauges:
    """Sizes of what an engine holds now."""

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_pages: int
    num_held_pages: int
    num_drafters: int  # loaded drafters
    kv_bytes: int  # bytes of all stores
    num_disk_pages: int = 0  # pages of the prefix cache on disk
    num_disk_bytes: int = 0
    drafter_bytes: dict[str, int] = field(default_factory=dict)  # bytes of requests' state in each drafter

    @property
    def held_share(self) -> float:
        """Share of its pages that requests hold."""
        return self.num_held_pages / max(self.num_pages, 1)

    @classmethod
    def none(cls) -> Gauges:
        """Return the gauges while there is no engine."""
        return cls(0, 0, 0, 0, 0, 0, 0)

    @classmethod
    def of(cls, scheduler: Scheduler, num_drafters: int, kv_bytes: int, drafter_bytes: dict[str, int]) -> Gauges:
        """Return the gauges of an engine with this scheduler."""
        files = None if scheduler.pool.disk is None else scheduler.pool.disk.files
        return cls(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_queued_tokens=scheduler.num_queued_tokens,
            num_pages=scheduler.pool.num_pages,
            num_held_pages=scheduler.pool.num_held,
            num_drafters=num_drafters,
            kv_bytes=kv_bytes,
            num_disk_pages=0 if files is None else len(files),
            num_disk_bytes=0 if files is None else files.num_bytes,
            drafter_bytes=drafter_bytes,
        )
