"""The flags that say how to sample, shared by `chat` and `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.params import SamplingParams

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

DEFAULTS = SamplingParams()
_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "tokens of an answer at most"),
    ("temperature", float, "0 takes the likeliest token"),
    ("top_p", float, "keep the likeliest tokens up to this share"),
    ("top_k", int, "keep so many of the likeliest tokens; 0 keeps all"),
    ("min_p", float, "drop tokens less likely than this times the likeliest"),
    ("repetition_penalty", float, "above 1, tokens that occurred become less likely"),
    ("presence_penalty", float, "above 0, tokens that were written become less likely"),
    ("frequency_penalty", float, "above 0, the same by how often they were written"),
    ("seed", int, "the same seed gives the same text; drawn if not given"),
)


def add_sampling_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    for name, kind, about in _NUMBERS:
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar="N", default=getattr(DEFAULTS, name), help=about)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer before this text; repeatable"
    )


def sampling_params(args: Namespace, **others: Any) -> SamplingParams:
    """Return what parsed flags ask for. Raises `RequestError`."""
    values = {name: getattr(args, name) for name, _, _ in _NUMBERS}
    return SamplingParams(**values, stop=tuple(args.stop or ()), **others)
