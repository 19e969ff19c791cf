"""What the engine and the process of a drafter say to each other: one question, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from paceline.core.nouns import Stop
from paceline.draft.drafter import MAX_K, Needs
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.wire import Failed, Message, Submit, TokenId

if TYPE_CHECKING:
    from paceline.engine.scheduler import Limits

_MOST_PARAMS_BYTES = 1 << 16  # of a request: a thousand biases
_SPARE_BYTES = 1 << 20
_NUM_BYTES = 5  # of an integer, at most

Number = Annotated[int, Meta(ge=0)]


class DraftPart(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A part of a message."""


class Birth(DraftPart, frozen=True):
    """A request in a row that the drafter has not been told of."""

    row: Number
    request: Submit
    written: tuple[TokenId, ...]  # of the answer
    held: tuple[Number, ...]  # leading tokens that each of the drafter's stores holds


class RowNews(DraftPart, frozen=True):
    """What has become of a row since the drafter was last told."""

    row: Number
    token_ids: tuple[TokenId, ...]  # that it gained
    first_page: Number = 0  # its pages are those known, up to here ...
    pages: tuple[Number, ...] = ()  # ... and these


# To the drafter --------------------------------------------------------------------------------------


class BeginDrafter(Message, frozen=True):
    """The first message: what to load."""

    config: EngineConfig
    index: Number  # of the drafter, among those of the config
    num_pages: Number  # of the engine


class Propose(Message, frozen=True):
    """Draft up to `ks[i]` tokens for the i-th row, or to where `stops[i]` says."""

    ended: tuple[Number, ...]  # rows whose requests are no more; comes before the births
    born: tuple[Birth, ...]
    rows: tuple[RowNews, ...]
    ks: tuple[Annotated[int, Meta(ge=1, le=MAX_K)], ...]
    stops: tuple[Stop | None, ...]


class Commit(Message, frozen=True):
    """These rows' rounds are over. said: the target's choices behind each one's newest token and its drafts."""

    rows: tuple[RowNews, ...]
    said: tuple[tuple[int, ...], ...]


class Forget(Message, frozen=True):
    """Drop what was learnt across requests."""


# To the engine ---------------------------------------------------------------------------------------


class Up(Message, frozen=True):
    """The drafter is there."""

    needs: Needs
    report: dict[str, str | int | float]


class Guesses(DraftPart, frozen=True):
    """A draft of a row."""

    token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_K)]  # may be nonsense
    confidence: Annotated[tuple[float, ...], Meta(max_length=MAX_K)] | None


class DraftReply(Message, frozen=True):
    """What is proposed, row by row."""

    rows: tuple[Guesses, ...]


class Held(Message, frozen=True):
    """How many leading tokens of each row each of the drafter's stores holds."""

    rows: tuple[tuple[Number, ...], ...]


class Done(Message, frozen=True):
    """There is nothing to tell."""


ToDrafter = BeginDrafter | Propose | Commit | Forget
ToEngine = Up | DraftReply | Held | Done | Failed

decode_to_drafter = msgspec.msgpack.Decoder(ToDrafter).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode


def most_bytes(limits: Limits) -> int:
    """Return the size of the largest message: all rows are born at once, each as long as it may be."""
    tokens = limits.max_len * (_NUM_BYTES + 1)  # and their pages
    return _SPARE_BYTES + limits.num_rows * (_MOST_PARAMS_BYTES + tokens)
