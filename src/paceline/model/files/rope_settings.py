"""RoPE as config.json tells it, in both of its spellings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.core.errors import BadModelFile, UnsupportedModel, suggest
from paceline.model.config import Rope
from paceline.model.files.json_reader import JsonReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.model.config import RopeScaling

_MAX_DIVISORS = 1 << 10

# `dynamic` changes nothing within the positions that the model was trained for, and we serve no others. `mrope`
# has several positions for a part of an image, and one for a token of text.
_SCALINGS: dict[str, RopeScaling] = {
    "default": "none",
    "dynamic": "none",
    "mrope": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "proportional": "proportional",
    "su": "longrope",  # longrope's name in the first files
}


def rope_of(read: JsonReader, table: dict[str, Any], theta: float) -> Rope:
    """Return the RoPE of a table of settings. Raises `UnsupportedModel`, `BadModelFile`.

    theta: the base where the table has none. read: the file's other keys.
    """
    inner = JsonReader(table, "config.json's RoPE settings: ")
    kind = str(table.get("rope_type", table.get("type", "default")))[:80]
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported{suggest(kind, _SCALINGS)}")
    scaling, positions = _SCALINGS[kind], read.integer("max_position_embeddings", 2048)
    trained = read.integer("original_max_position_embeddings", positions)
    original = inner.integer("original_max_position_embeddings", trained)
    head_dim = max(read.integer("head_dim", 1), 1)
    rotated = read.integer("rotary_dim", head_dim)  # MiniMax-M2 has this key
    ratio = positions / max(original, 1) if scaling in _MAGNITUDES else 1.0
    factor = inner.number("factor", ratio)
    magnitude = inner.factor("attention_factor")
    if magnitude is None:
        magnitude = _MAGNITUDES[scaling](inner, factor, original) if scaling in _MAGNITUDES else 1.0
    return Rope(
        theta=inner.number("rope_theta", theta),
        scaling=scaling,
        factor=factor,
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        original_context=original,
        share=inner.number("partial_rotary_factor", read.number("partial_rotary_factor", rotated / head_dim)),
        magnitude=magnitude,
        beta_fast=inner.number("beta_fast", 32.0) or 32.0,
        beta_slow=inner.number("beta_slow", 1.0) or 1.0,
        truncates=inner.flag("truncate", default=True),
        divisors=_divisors(table, "short_factor") if scaling == "longrope" else (),
        long_divisors=_divisors(table, "long_factor") if scaling == "longrope" else (),
        query_growth=inner.number("llama_4_scaling_beta", 0.0),
    )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return the factor by which YaRN enlarges what it rotates (arXiv 2309.00071, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def longrope_magnitude(factor: float, original: int) -> float:
    """Return the factor by which LongRoPE enlarges what it rotates (arXiv 2402.13753)."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0


def _yarn(inner: JsonReader, factor: float, _: int) -> float:
    own, everywhere = inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)
    if not own or not everywhere:
        return yarn_magnitude(factor)
    return yarn_magnitude(factor, own) / yarn_magnitude(factor, everywhere)


_MAGNITUDES: dict[str, Callable[[JsonReader, float, int], float]] = {
    "yarn": _yarn,
    "longrope": lambda _, factor, original: longrope_magnitude(factor, original),
}


def _divisors(table: dict[str, Any], key: str) -> tuple[float, ...]:
    """Return the divisors of the angles."""
    values = table.get(key)
    known = isinstance(values, list) and len(values) <= _MAX_DIVISORS
    if not isinstance(values, list) or not known or not all(type(v) in (int, float) for v in values):
        raise BadModelFile(f"config.json's RoPE settings: {key} must be a list of numbers")
    return tuple(float(v) for v in values)
