"""Devices that passes run on, and what backends find out about them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.system import core_groups, usable_cores

SAME = "same"  # drafters run where the target does
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Device:
    """Some cores, or a device by PyTorch's name. Neither: all cores of the process."""

    cores: frozenset[int] = frozenset()
    torch_name: str | None = None

    @classmethod
    def parse(cls, text: str) -> Device | None:
        """Read `same` (None), `cpu:2-3,6`, or a name such as `cuda:1`. Raises `ConfigError`."""
        if text == SAME:
            return None
        kind, _, which = text.partition(":")
        if kind != CPU:
            return cls(torch_name=text)
        cores, usable = frozenset[int](), usable_cores()
        with suppress(ConfigError):  # the error would name --cores
            cores = cores.union(*core_groups(which))
        if not cores or not cores <= usable:
            raise ConfigError(
                f"--draft-device {text}: write {CPU}:2-3 or {CPU}:2,5 with cores that this process may use, "
                f"which are {sorted(usable)}"
            )
        return cls(cores)

    @property
    def is_host(self) -> bool:
        """True if passes run on this machine's cores."""
        return self.torch_name is None or self.torch_name.partition(":")[0] == CPU

    def __str__(self) -> str:
        listed = ",".join(map(str, sorted(self.cores)))
        return self.torch_name or (f"{CPU}:{listed}" if listed else CPU)


class Finding(NamedTuple):
    """One thing that a backend needs to run here, as its probe found it."""

    subject: str
    ok: bool
    text: str  # what was found; if not ok, also what to do


class DeviceDefaults(NamedTuple):
    """Limits of an engine on a kind of device, where the user sets none."""

    num_rows: int  # requests that run at once
    prefill_tokens: int  # prompt tokens computed in one step, over all rows
    kv_share: float  # share of the device's free memory for the target's KV
    kv_share_with_drafters: float  # the share beside drafters, whose weights, KV and taps need memory, too
    max_len: int = 8192  # tokens of prompt and answer of one request
