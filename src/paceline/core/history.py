"""Token counts of a row, kept as the edits that penalties make to logits."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from paceline.core.nouns import Edits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.core.nouns import ChooseKind
    from paceline.core.params import SamplingParams

_ID, _SCALE, _ADD = 0, 1, 2  # rows of `_EditTable.columns`; the fourth is the count
_NEW = (0.0, 1.0, 0.0, 0.0)
_MIN_ROOM = 32


def choose_kind(params: SamplingParams, law_needs_probs: bool) -> ChooseKind:
    """Return a row's kind of token choice: by its parameters and the engine's law only."""
    if law_needs_probs and not params.greedy:
        return "logits"
    if params.logprobs is not None or params.filtered:
        return "sampled"
    edited = params.penalised or bool(params.logit_bias) or params.min_tokens > 0
    return "noisy" if edited or not params.greedy else "argmax"


class History:
    """Counts of a row's tokens, kept as their edits to the next logits.

    A row without penalties keeps nothing but its logit bias, however long it grows.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        repeated = prompt_ids if params.repetition_penalty != 1.0 else ()
        self._table = _EditTable.of([*params.logit_bias, *repeated])
        for token_id, bias in params.logit_bias.items():
            self._table.set(token_id, _ADD, bias)
        self._table.set_all(repeated, _SCALE, params.repetition_penalty)
        self._ahead: tuple[tuple[int, ...], _EditTable] = (), self._table  # drafts, and the table behind them
        self.penalised = params.penalised
        self.never_edits = not (self.penalised or self._table.size or params.min_tokens)

    def append(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the answer."""
        if self.penalised:
            for token_id in token_ids:
                self._table.count_token(int(token_id), self._params)
            self._ahead = (), self._table

    def edits(self, drafted: Sequence[int], num_generated: int, stop_ids: frozenset[int]) -> Edits | None:
        """Return the edits at the position behind the drafts, ids ascending, or None.

        num_generated: tokens of the answer before the drafts. stop_ids: banned until the answer has `min_tokens`.
        """
        table = self._after(tuple(drafted)) if self.penalised else self._table
        if num_generated + len(drafted) < self._params.min_tokens:
            table = table.copy(room=len(stop_ids))
            for token_id in stop_ids:
                table.set(token_id, _ADD, -inf)
        return table.edits()

    def _after(self, drafted: tuple[int, ...]) -> _EditTable:
        """Return the table behind the drafts and keep it: the next call often adds one."""
        if not drafted:
            return self._table
        known, table = self._ahead
        if drafted[: len(known)] != known:
            known, table = (), self._table
        if len(known) < len(drafted):
            table = table.copy(room=len(drafted) - len(known))
            for token_id in drafted[len(known) :]:
                table.count_token(token_id, self._params)
            self._ahead = drafted, table
        return table


class _EditTable:
    """Distinct token ids, ascending, with the edits of each, in columns that grow by doubling.

    `columns` is [4, capacity] float64 (which holds every id exactly), of which the first `size` columns are used.
    Its rows: the id, `Edits.scale`, `Edits.add`, and the number of times the token is in the answer.
    """

    def __init__(self, columns: NDArray[float64], size: int) -> None:
        self.columns = columns
        self.size = size

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> _EditTable:
        """Return a table of these ids without edits."""
        import numpy as np

        ids = np.array(sorted(set(token_ids)), np.int64)  # `np.unique` imports a package of its own
        columns = np.array(_NEW)[:, None].repeat(len(ids), axis=1)
        columns[_ID] = ids
        return cls(columns, len(ids))

    def copy(self, room: int) -> _EditTable:
        """Return a copy with room for `room` more ids."""
        import numpy as np

        columns = np.empty((len(_NEW), self.size + room))
        columns[:, : self.size] = self.columns[:, : self.size]
        return _EditTable(columns, self.size)

    def set(self, token_id: int, field: int, value: float) -> None:
        """Set one field of an id, which is inserted if it is new."""
        slot = self._slot(token_id)  # first: it may replace `columns`
        self.columns[field, slot] = value

    def set_all(self, token_ids: Sequence[int], field: int, value: float) -> None:
        """Set one field of ids that are all in the table."""
        self.columns[field, self.columns[_ID, : self.size].searchsorted(token_ids)] = value

    def count_token(self, token_id: int, params: SamplingParams) -> None:
        """Count one more token of the answer."""
        slot = self._slot(token_id)
        _, _, add, count = self.columns[:, slot].tolist()
        add -= params.frequency_penalty + (0.0 if count else params.presence_penalty)
        self.columns[:, slot] = token_id, params.repetition_penalty, add, count + 1

    def edits(self) -> Edits | None:
        """Return the table as edits, copied; None if it is empty."""
        import numpy as np

        if not self.size:
            return None
        ids, scale, add, _ = self.columns[:, : self.size]
        return Edits(ids.astype(np.int64), scale.astype(np.float32), add.astype(np.float32))

    def _slot(self, token_id: int) -> int:
        slot = int(self.columns[_ID, : self.size].searchsorted(token_id))
        if slot == self.size or self.columns[_ID, slot] != token_id:
            if self.size == self.columns.shape[1]:
                self.columns = self.copy(room=max(self.size, _MIN_ROOM)).columns
            self.columns[:, slot + 1 : self.size + 1] = self.columns[:, slot : self.size]
            self.columns[:, slot] = token_id, *_NEW[1:]
            self.size += 1
        return slot
