"""Laws of verification: the protocol, and the laws by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from paceline.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from paceline.core.nouns import Draft, Scores, Verdict

LAWS: dict[str, str] = {  # name -> module:class
    "coupled": "paceline.verify.coupled:Coupled",
    "rejection": "paceline.verify.rejection:Rejection",
    "block": "paceline.verify.block_verification:BlockVerification",
    "typical": "paceline.verify.typical:Typical",
}


class Law(Protocol):
    """Decides which drafts are kept.

    Under every law but `typical`, what is emitted follows the target's own distribution.
    """

    name: str
    admits_any_trim: bool  # a trim may look at the step's drafts without biasing the output
    walks_trees: bool  # drafts may have branches
    needs_probs: bool  # rows with a temperature need logits, and drafts the q that they were drawn from

    def judge(self, draft: Draft, scores: Scores) -> Verdict:
        """Return each row's kept drafts and next target token; rows without scores get nothing."""


def load_law(name: str) -> Law:
    """Return the law of that name. Raises `ConfigError` for one that is not known."""
    if name not in LAWS:
        raise ConfigError(f"unknown law {name!r}{suggest(name, LAWS)}")
    module, cls = LAWS[name].split(":")
    return cast("Law", getattr(import_module(module), cls)())
