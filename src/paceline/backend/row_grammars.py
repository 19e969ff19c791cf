"""Grammars of rows: states, masks at the positions of a pass, drafts that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.core.nouns import NO_DRAFT, UNCHOSEN, Draft, Edits, RowDraft, noun
from paceline.core.sampling import allowed_by

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy import int32
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, BatchRow, Plan, SamplingSpec, Scores
    from paceline.core.request_nouns import Admission
    from paceline.model.grammar import Grammars, GrammarState

GRAMMAR = "grammar"  # the drafter's name


@noun
class RowMasks:
    """Masks of a pass's rows, each after its newest token and after every draft."""

    masks: dict[int, NDArray[int32]]  # index in the batch -> [1 + num_drafts, num_words]
    drafts: dict[int, Sequence[int]]  # index in the batch -> drafts that the masks were made for


NO_MASKS = RowMasks({}, {})


@noun
class PassMasks:
    """Masks that a pass chooses under.

    They are filled in beside the pass, which waits for `open` before it chooses.
    """

    words: NDArray[int32]  # [num_wanted, num_words] zeros at first: no token may be chosen
    cu_len: Sequence[int]  # as `Scores.cu_len`
    shared: kernels.Masks  # the kernels' masks, over `words`

    def open(self) -> None:
        """Release the pass: it reads the masks from here on."""
        self.shared.open()


class RowGrammars:
    """States of rows with a grammar. Without such rows, callers leave it alone."""

    def __init__(self) -> None:
        self.compiled: Grammars | None = None  # of the engine's own rows; None in a copy of them
        self.states: dict[int, GrammarState] = {}  # by row

    def admit(self, admission: Admission) -> None:
        """Begin a row; the answer of a request that was preempted is replayed."""
        self.states.pop(admission.row, None)
        grammar = admission.request.params.grammar
        if grammar is not None and self.compiled is not None:
            answer = admission.token_ids[len(admission.request.prompt_ids) :]
            self.states[admission.row] = self.compiled.begin(grammar, answer)

    def take(self, row: int, token_ids: Sequence[int]) -> None:
        """Take in the tokens that a row gained."""
        if (state := self.states.get(row)) is not None:
            state.take(token_ids)

    def forced(self, row: int, most: int) -> list[int]:
        """Return up to `most` tokens that a row's grammar forces next."""
        state = self.states.get(row)
        return [] if state is None else state.fit((), most)

    def fit(self, batch: Batch, draft: Draft, plan: Plan, names: Collection[str]) -> Draft:
        """Cut drafts where they leave the grammar, and add tokens that it forces.

        names: the engine's drafters. Without `grammar` among them, forced tokens count as the planned drafter's.
        """
        filled = {name: GRAMMAR if GRAMMAR in names else name for name in names}
        rows, unfitted = list(draft.rows), dict[int, RowDraft]()
        for i, (r, d) in enumerate(zip(batch.rows, draft.rows, strict=True)):
            if r.row in self.states and r.max_drafts:
                rows[i] = self._fit_row(r, d, filled.get(plan.drafter(r.row) or ""))
                if rows[i] is not d:
                    unfitted[i] = d
        return Draft(tuple(rows), draft.budget, draft.branched, draft.failed, unfitted or None)

    def _fit_row(self, r: BatchRow, d: RowDraft, filler: str | None) -> RowDraft:
        if d.is_bound:
            return d
        token_ids = self.states[r.row].fit(d.token_ids, r.max_drafts)
        if token_ids == list(d.token_ids):
            return d
        known = d.num_alike(token_ids)
        if not token_ids or not (known or filler):
            return NO_DRAFT
        confidence = None
        if d.confidence is not None or not known:
            confidence = [*(d.confidence or ())][:known] + [SURE] * (len(token_ids) - known)
        return RowDraft(token_ids, d.drafter if known else filler, confidence)

    def masks(self, batch: Batch, draft: Draft, room: PassMasks | None = None) -> RowMasks:
        """Return the masks of a pass, made beside it.

        room: where the pass itself reads them.
        """
        try:
            return self._masks(batch, draft, room)
        finally:
            if room is not None:
                room.open()

    def _masks(self, batch: Batch, draft: Draft, room: PassMasks | None) -> RowMasks:
        compiled = self.compiled
        if compiled is None:
            return NO_MASKS
        rows = enumerate(zip(batch.rows, draft.rows, strict=True))
        wanted = {i: (self.states[r.row], d.token_ids) for i, (r, d) in rows if r.samples and r.row in self.states}
        if not wanted or any(drafts and drafts[0] == UNCHOSEN for _, drafts in wanted.values()):
            return NO_MASKS  # or the drafts are not known yet: a device makes them
        if room is None:
            masks = compiled.masks(list(wanted.values()))
        else:
            masks = compiled.fill_masks(list(wanted.values()), room.words, [room.cu_len[i] for i in wanted])
        return RowMasks(dict(zip(wanted, masks, strict=True)), {i: drafts for i, (_, drafts) in wanted.items()})

    def room(self, batch: Batch, specs: Sequence[SamplingSpec], cu_len: Sequence[int]) -> PassMasks | None:
        """Return room for the masks of a pass that chooses under them; None without any."""
        if self.compiled is None:
            return None
        masked = np.zeros(len(specs), np.uint8)
        for r, start, end in zip(batch.rows, cu_len, cu_len[1:], strict=False):
            masked[start:end] = r.row in self.states and [spec.kind != "logits" for spec in specs[start:end]]
        words = np.zeros((len(specs), self.compiled.num_words), np.int32)
        return PassMasks(words, cu_len, kernels.Masks(words, masked))

    def masked(self, batch: Batch, draft: Draft, scores: Scores, made: RowMasks) -> Scores:
        """Return scores whose specs have the masks.

        made: masks made beside the pass, if its drafts were known then.
        """
        if scores.logits is None:
            return scores  # the pass has chosen under its masks
        if (
            any(list(draft.rows[i].token_ids) != list(drafts) for i, drafts in made.drafts.items())
            or not made.masks
        ):
            made = self.masks(batch, draft)
        if not made.masks:
            return scores
        specs = list(scores.specs)
        for index, masks in made.masks.items():
            places = range(scores.cu_len[index], scores.cu_len[index + 1])
            for at, mask in zip(places, masks, strict=True):
                if specs[at].kind == "logits":  # tokens of other kinds were chosen by the pass
                    specs[at] = masked_spec(specs[at], mask)
        return replace(scores, specs=specs)


SURE = 0.97  # chance that a forced token is kept; not 1, as other tokens may write the same text


def masked_spec(spec: SamplingSpec, mask: NDArray[int32]) -> SamplingSpec:
    """Return a spec under a mask; the grammar wins where all allowed tokens are banned."""
    edits = spec.edits
    if edits is not None and np.isneginf(edits.add).any():
        allowed = allowed_by(mask, 32 * len(mask))
        banned = edits.ids[np.isneginf(edits.add)]
        if int(allowed.sum()) == int(allowed[banned].sum()):
            edits = Edits(edits.ids, edits.scale, np.where(np.isneginf(edits.add), np.float32(0), edits.add))
    return spec._replace(mask=mask, edits=edits)
