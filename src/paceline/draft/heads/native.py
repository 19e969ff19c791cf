"""Draft heads on the `native` backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.draft.heads.checkpoint import Head
    from paceline.draft.heads.runner import HeadRunner
    from paceline.model.backend import Decoder


def load_runner(head: Head, target: Decoder) -> HeadRunner:
    """Make a head's runner, see `engine/backends.py`."""
    raise ConfigError("the native backend does not run draft heads yet; use --backend reference")
