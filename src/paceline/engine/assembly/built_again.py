"""Drafters that share tables with the target, built again over newer ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.engine.assembly.placement import place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backend.seam import Decoder
    from paceline.draft.drafter import Drafter, Memory, Target
    from paceline.draft.registry import DrafterConfig, Loader
    from paceline.engine.assembly.config import EngineConfig


def rebuilders(
    config: EngineConfig,
    target: Target,
    configs: Sequence[DrafterConfig],
    load: Loader,
    over: Callable[[Decoder], Memory],
) -> dict[str, Callable[[Decoder], Drafter]]:
    """Return makers of the drafters that read tables of the target, by name.

    They are given a decoder with newer tables. over: returns what drafters may share of one.
    """

    def build_again(one: DrafterConfig, newer: Decoder) -> Drafter:
        if config.draft_process:
            raise ConfigError("its process has read the target's first tables")
        return place(one.build(replace(target, local=over(newer)), load), config.placement)

    return {one.name: partial(build_again, one) for one in configs if not one.stands_alone}
