"""Sampling of requests that say nothing: the model's own, else usual values."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    Defaults = Mapping[str, int | float]  # fields of `SamplingParams`; those that are missing are neutral

log = logging.getLogger(__name__)

KINDS = MODEL, NEUTRAL = ("model", "neutral")  # values of --sampling-defaults
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
USUAL: Defaults = {"temperature": 0.7, "top_p": 0.95}  # for a model that asks for nothing


def checked(found: Mapping[str, object]) -> dict[str, int | float]:
    """Return those values of a model's file that `SamplingParams` takes; others are logged and dropped."""
    kept: dict[str, int | float] = {}
    for name in FIELDS:
        value = found.get(name)
        if value is None:
            continue
        try:
            default_params({name: value})  # type: ignore[dict-item]
        except RequestError as error:
            log.warning("the model's own %s is not used: %s", name, error)
        else:
            assert isinstance(value, int | float)
            kept[name] = value
    return kept


def chosen(kind: str, found: Mapping[str, object]) -> tuple[Defaults, str]:
    """Return a model's defaults of a kind, and why. found: values of its files."""
    if kind == NEUTRAL:
        return {}, "as asked: requests say themselves how to sample"
    if asked := checked(found):
        return asked, "where a request says nothing, as the model's files ask"
    return USUAL, f"where a request says nothing; --sampling-defaults {NEUTRAL} turns it off"


def told(defaults: Defaults) -> str:
    """Return defaults as text."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items()) or "temperature 1, no filter"


def default_params(defaults: Defaults) -> SamplingParams:
    """Return the parameters of a call that gives none."""
    values: dict[str, Any] = dict(defaults)
    return SamplingParams(**values)
