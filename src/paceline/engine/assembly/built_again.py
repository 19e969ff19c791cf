"""Drafters that share tables with the target, built again over newer ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.engine.assembly.placement import place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.draft.drafter import Drafter, Target
    from paceline.draft.registry import DrafterConfig, Loader
    from paceline.engine.assembly.config import EngineConfig


def rebuilders(
    config: EngineConfig, target: Target, configs: Sequence[DrafterConfig], load: Loader
) -> dict[str, Callable[[], Drafter]]:
    """Return makers of the drafters that read tables of the target, by name."""

    def build_again(one: DrafterConfig) -> Drafter:
        if config.draft_process:
            raise ConfigError("its process has read the target's first tables")
        return place(one.build(target, load), config.placement)

    return {one.name: partial(build_again, one) for one in configs if not one.stands_alone}
