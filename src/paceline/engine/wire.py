"""Parts of the messages between Paceline's processes: typed msgpack, never pickle."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from paceline.core.errors import PacelineError, RequestError
from paceline.core.params import (
    MAX_CHOICES,
    MAX_NAME_CHARS,
    MAX_SEED,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    Grammar,
    SamplingParams,
    Speculation,
)
from paceline.core.request_nouns import Request

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ID_CHARS = 140  # 128 for a request's id, the rest for the number of a leg of its answer
MAX_SALT_CHARS = 256
MAX_PROMPT_TOKENS = 1 << 24

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]

# What decoding raises for bytes that are no message.
BAD_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

encode = msgspec.msgpack.Encoder().encode


class Message(Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """A message, tagged with the name of its class."""


class Submit(Message, frozen=True):
    """A request. `params` holds the fields of `SamplingParams` that differ from their defaults."""

    request_id: RequestId
    prompt_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    params: dict[str, Any]
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)]
    choice: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)] = 0
    salt: Salt = ""
    told: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)] = ()
    tells_start: bool = False
    whole: bool = False
    within: bool = False
    draft: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = (
        None  # of `Speculation`; None: the request has none
    )
    k: int | None = None
    tpot_ms: float | None = None
    details: bool = False
    law: str | None = None
    budget: float | None = None

    @classmethod
    def of(cls, request: Request) -> Submit:
        """Return the message that carries a request."""
        r = request
        s = r.speculation
        speculation = (s.draft, s.k, s.tpot_ms, s.details, s.law, s.budget) if s else ()
        return cls(
            r.request_id,
            r.prompt_ids,
            _unusual(r.params),
            r.seed,
            r.choice,
            r.salt,
            r.told,
            r.tells_start,
            r.whole,
            r.within,
            *speculation,
        )

    def request(self) -> Request:
        """Return the request. Raises `RequestError` for bad parameters."""
        asked = self.k, self.tpot_ms, self.details, self.law, self.budget
        return Request(
            self.request_id,
            self.prompt_ids,
            _params(self.params),
            self.seed,
            self.choice,
            self.salt,
            None if self.draft is None else Speculation(self.draft, *asked),
            self.told,
            self.tells_start,
            self.whole,
            self.within,
        )


class Failed(Message, frozen=True):
    """A failure. `kind`: its class in the error tree, "" for a bug of ours."""

    kind: str
    message: str


_DEFAULTS = SamplingParams()
_TUPLES = frozenset({"stop", "stop_token_ids"})


def _unusual(params: SamplingParams) -> dict[str, Any]:
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    values["logit_bias"] = dict(params.logit_bias)
    values["grammar"] = params.grammar and [params.grammar.kind, params.grammar.text]
    return {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}


def _params(values: Mapping[str, Any]) -> SamplingParams:
    fitting: dict[str, Any] = {k: tuple(v) if k in _TUPLES else v for k, v in values.items()}
    try:
        if fitting.get("grammar") is not None:
            fitting["grammar"] = Grammar(*fitting["grammar"])
        return SamplingParams(**fitting)
    except TypeError as error:
        raise RequestError(f"bad parameters: {error}") from None


def _tree(root: type[PacelineError]) -> dict[str, type[PacelineError]]:
    tree = {root.__name__: root}
    for child in root.__subclasses__():
        tree |= _tree(child)
    return tree


_ERRORS = _tree(PacelineError)


def error_of(kind: str, message: str, param: str | None = None) -> PacelineError:
    """Return an error of another process as the class that it has there."""
    found = _ERRORS.get(kind, PacelineError)
    return found(message, param) if issubclass(found, RequestError) else found(message)
