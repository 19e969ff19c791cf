"""Drafters that share tables with the target, built again over newer tables."""

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
    from paceline.model.heads.checkpoint import Head

    BuildAgain = Callable[[Decoder, Head | None], Drafter]  # from newer tables, and a newer head within the target


def rebuilders(
    config: EngineConfig,
    target: Target,
    configs: Sequence[DrafterConfig],
    load: Loader,
    over: Callable[[Decoder], Memory],
) -> dict[str, BuildAgain]:
    """Return makers of the drafters that read tables of the target, by name.

    A maker gets a decoder with newer tables, and the head within the newer model's files, if any. over: returns
    what drafters may share of a decoder.
    """

    def build_again(one: DrafterConfig, newer: Decoder, head_within: Head | None) -> Drafter:
        if config.draft_process:
            raise ConfigError("its process has read the target's first tables")
        over_newer = replace(target, local=over(newer), head_within=head_within or target.head_within)
        return place(one.build(over_newer, load), config.placement)

    return {one.name: partial(build_again, one) for one in configs if not one.stands_alone}
