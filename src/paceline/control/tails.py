"""Tails of roll-outs: where the last long answers go once no further request comes.

`spread` evens rows out: the fullest replica has fewer, so speculation is deeper and the last answer ends sooner.
`pack` gathers the rows on few replicas and frees the others, for a trainer that waits for their cores.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.control.routing import ReplicaView

OFF, SPREAD, PACK = "off", "spread", "pack"
MOST_ROWS = 4096
_ROWS = re.compile("[0-9]{1,4}")
HORIZON_TOKENS = 256  # tokens that an answer of the tail is taken to have still to write


@dataclass(frozen=True, slots=True)
class TailRule:
    """Choice of what is done with a tail."""

    kind: str = OFF
    rows: int = 0  # most rows of a replica that others' rows are packed onto


def parse_tail(text: str) -> TailRule:
    """Return the rule that `off`, `spread` or `pack:ROWS` names. Raises `ConfigError`."""
    kind, _, rows = text.partition(":")
    if kind == PACK and _ROWS.fullmatch(rows) and 1 <= int(rows) <= MOST_ROWS:
        return TailRule(kind, int(rows))
    if text in (OFF, SPREAD):
        return TailRule(text)
    raise ConfigError(f"--tail is off, spread, or pack:ROWS with 1 to {MOST_ROWS} rows, not {text[:64]!r}")


def to_free(rows: Sequence[int], most: int) -> int | None:
    """Return the replica with the fewest rows if the others have room, else None.

    rows: of each replica. most: rows that a replica may have.
    """
    if len(rows) < 2 or sum(rows) > most * (len(rows) - 1):
        return None
    return min(range(len(rows)), key=lambda index: rows[index])


def to_even(replicas: Sequence[ReplicaView], tokens: int) -> tuple[int, int] | None:
    """Return who gives a row and who takes it, None if that gains nothing.

    tokens: number that the row's new replica computes anew. Only the row's own gain counts, over `HORIZON_TOKENS`.
    """
    if len(replicas) < 2:
        return None
    fewest = min(range(len(replicas)), key=lambda index: replicas[index].open_rows)
    most = max(range(len(replicas)), key=lambda index: replicas[index].open_rows)
    giver, taker = replicas[most], replicas[fewest]
    if giver.open_rows - taker.open_rows < 2:
        return None
    gain_s = _step_s(giver, giver.open_rows) - _step_s(taker, taker.open_rows + 1)
    return (most, fewest) if gain_s * HORIZON_TOKENS > tokens * taker.prefill_s_per_token else None


def _step_s(replica: ReplicaView, rows: int) -> float:
    """Return seconds per token of each row; beyond the table they grow with the rows."""
    table = replica.step_s_by_rows
    return table[rows - 1] if rows <= len(table) else table[-1] * rows / len(table)
