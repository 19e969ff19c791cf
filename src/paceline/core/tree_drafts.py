"""Drafts with some of their branches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.nouns import RowDraft


def with_only(draft: RowDraft, wanted: Callable[[int], bool]) -> RowDraft:
    """Return a chain with the wanted branches. wanted: takes the index among their tokens."""
    if draft.branches is None:
        return draft
    return replace(draft, branches=draft.branches.only(len(draft), len(draft), wanted))


def with_most(draft: RowDraft, num_branch_tokens: int) -> RowDraft:
    """Return a chain with the first tokens of its branches."""
    return with_only(draft, lambda index: index < num_branch_tokens)
