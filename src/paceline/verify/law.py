"""The `Law` protocol and the registry of laws."""

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
    """A rule that keeps drafts such that emitted tokens follow the target's distribution."""

    name: str
    admits_any_trim: bool  # True if trimming by this step's drafts or confidences leaves the output unbiased
    needs_probs: bool  # True if sampled rows need logits, and drafts the distribution they were drawn from

    def judge(self, draft: Draft, scores: Scores) -> Verdict:
        """Return the kept drafts and the target's next token of each row; nothing for a row without scores."""
        ...


def load_law(name: str) -> Law:
    """Return the law called `name`. Raises `ConfigError` if there is none."""
    if name not in LAWS:
        raise ConfigError(f"unknown law {name!r}{suggest(name, LAWS)}")
    module, cls = LAWS[name].split(":")
    return cast("Law", getattr(import_module(module), cls)())
