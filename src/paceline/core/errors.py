"""Errors a user can cause. Each message says what is wrong and what to do.

    PacelineError
    ├── ConfigError            an option or a combination of options that cannot work
    │   └── DrafterMismatch    a drafter that does not fit its target
    ├── ModelError             a model that cannot be used
    │   ├── ModelNotFound      nothing there
    │   ├── BadModelFile       truncated, lying about sizes, missing tensors, wrong checksum
    │   └── UnsupportedModel   an architecture, quantisation or tokenizer we do not know
    ├── RequestError           one request that cannot be served; others are not disturbed
    │   ├── PromptTooLong      prompt plus answer exceed the context
    │   └── QueueFull          try again later
    └── EngineDied             the engine process is gone; it is being restarted
        ├── LineBroke          the line to an engine broke; the engine may well live
        └── PartlyObeyed       a command that some replicas obeyed and others did not

Anything else that escapes is a bug of ours.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class PacelineError(Exception):
    """Root of every error a user can cause."""


class ConfigError(PacelineError):
    """An option, or a combination of options, that cannot work."""


class DrafterMismatch(ConfigError):  # noqa: N818
    """A drafter that does not fit its target."""


class ModelError(PacelineError):
    """A model that cannot be used."""


class ModelNotFound(ModelError):  # noqa: N818
    """No model at the given place."""


class BadModelFile(ModelError):  # noqa: N818
    """A model file that is truncated, lies about its contents or lacks tensors."""


class UnsupportedModel(ModelError):  # noqa: N818
    """An architecture, quantisation or tokenizer that Paceline does not know."""


class RequestError(PacelineError):
    """One request that cannot be served. `param` names the offending field, if one does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):  # noqa: N818
    """Prompt and answer together exceed what the engine can hold."""

    @classmethod
    def of(cls, prompt_len: int, max_tokens: int, max_len: int) -> PromptTooLong:
        """Return the error for an answer that does not fit behind its prompt."""
        return cls(
            f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}, together more than the {max_len} "
            "this engine holds for one request; shorten either, or start it with a greater --max-len or "
            "--kv-tokens if the model takes more",
            "max_tokens" if prompt_len < max_len else "messages",
        )


class QueueFull(RequestError):  # noqa: N818
    """The bounded waiting queue has no room; the client may retry."""


class EngineDied(PacelineError):  # noqa: N818
    """The engine process is gone."""


class LineBroke(EngineDied):
    """The line to an engine broke; the engine may well live and go on."""


class PartlyObeyed(EngineDied):
    """A command that some replicas obeyed and others did not."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return an error message's end: `; did you mean 'x'?`, or all known names."""
    choices = sorted(known)
    close = get_close_matches(name, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(choices)}"
