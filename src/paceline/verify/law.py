"""The seam of verification: what a law is, and which there are."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from paceline.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from paceline.core.nouns import Draft, Scores, Verdict

LAWS: dict[str, str] = {  # name -> module:class
    "coupled": "paceline.verify.coupled:Coupled",
    "rejection": "paceline.verify.rejection:Rejection",
    "block": "paceline.verify.block:Block",
}


class Law(Protocol):
    """Decides which drafts are kept, such that what is emitted follows the target's own distribution."""

    name: str
    admits_any_trim: bool  # a budget may look at the drafts of the step; else it would bias what is emitted
    needs_probs: bool  # rows with a temperature need logits, and drafts the q that they were drawn from

    def judge(self, draft: Draft, scores: Scores) -> Verdict:
        """Return, for every row, its kept drafts and the target's next token; nothing for a row not scored."""
        ...


def load_law(name: str) -> Law:
    """Return the law of that name. Raises `ConfigError` for one that is not known."""
    if name not in LAWS:
        raise ConfigError(f"unknown law {name!r}{suggest(name, LAWS)}")
    module, cls = LAWS[name].split(":")
    return cast("Law", getattr(import_module(module), cls)())
