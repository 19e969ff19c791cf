"""Families of calls by name, and the choice among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, suggest
from paceline.serve.api.tool_calls.harmony import HarmonyCalls
from paceline.serve.api.tool_calls.object_families import (
    GemmaCalls,
    HermesCalls,
    JsonCalls,
    LlamaCalls,
    MistralCalls,
)
from paceline.serve.api.tool_calls.qwen_xml import QwenXmlCalls

if TYPE_CHECKING:
    from collections.abc import Collection

    from paceline.serve.api.tool_calls.family import ToolFamily

# In the order in which they are tried; the last fits every model.
FAMILIES: tuple[ToolFamily, ...] = (
    HarmonyCalls(),
    MistralCalls(),
    QwenXmlCalls(),
    HermesCalls(),
    LlamaCalls(),
    GemmaCalls(),
    JsonCalls(),
)
BY_NAME = {family.name: family for family in FAMILIES}


def family_of(template: str, tokens: Collection[str], name: str | None = None) -> ToolFamily:
    """Return the family named, else the one that fits a model. Raises `ConfigError`.

    template: source of the chat template. tokens: texts of the special tokens.
    """
    if name is not None:
        check_family(name)
        return BY_NAME[name]
    return next(family for family in FAMILIES if family.fits(template, tokens))


def check_family(name: str) -> None:
    """Raise `ConfigError` for a name that no family has."""
    if name not in BY_NAME:
        raise ConfigError(f"unknown tool parser {name!r}{suggest(name, BY_NAME)}; known: {', '.join(BY_NAME)}")
