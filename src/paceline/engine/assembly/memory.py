"""How much memory there is to use, and how many KV pages that makes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.pages import pages_for

if TYPE_CHECKING:
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.scheduler import Limits

KV_SHARE = 0.5  # of the free memory; the rest is for activations, drafters and other programs
LEAST_PAGES = 4
ENOUGH_TOKENS = 1 << 16  # more than this is not taken unasked


def available_bytes() -> int:
    """Return the memory that can be had without swapping, within the control group's limit if there is one."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return max(free, 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def choose_num_pages(config: EngineConfig, limits: Limits, bytes_per_token: int) -> tuple[int, str]:
    """Return how many KV pages to make, and why. Raises `ConfigError` if there is no room for any."""
    if config.kv_tokens is not None:
        return max(pages_for(config.kv_tokens), 1), "as asked"
    wanted = limits.num_rows * pages_for(limits.max_len)
    affordable = int(available_bytes() * KV_SHARE) // (bytes_per_token * PAGE_TOKENS)
    if affordable < LEAST_PAGES:
        raise ConfigError("there is no memory left for the KV cache; close other programs or set --kv-tokens")
    enough = pages_for(max(ENOUGH_TOKENS, limits.max_len))
    num_pages = min(wanted, affordable, enough)
    if num_pages == wanted:
        return num_pages, f"room for {limits.num_rows} requests of {limits.max_len} tokens"
    if num_pages == affordable:
        return num_pages, f"{KV_SHARE:.0%} of the free memory"
    return num_pages, "enough for most loads; --kv-tokens sets more"
