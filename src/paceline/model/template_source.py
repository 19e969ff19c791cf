"""Source of a chat template, for those who do not render it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TEMPLATE_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Text of a template and the special tokens it may name."""

    text: str
    special: dict[str, str]  # bos_token, eos_token ... -> text
