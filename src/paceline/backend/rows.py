"""Per-row state of a backend: everything about a running request that depends on outcomes.

The scheduler names rows and bounds. Only these rows know how long a row really is, which token is its newest and
where its tokens go. Drafters see them through `RowView`. A backend on a device keeps its own copy of this state,
and the host learns it late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.row_grammars import RowGrammars
from paceline.backend.seam import Packed
from paceline.core.history import History, choose_kind
from paceline.core.nouns import PAGE_TOKENS, SamplingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.seam import RowView, Span
    from paceline.core.nouns import Batch, ChooseKind, Draft, Verdict
    from paceline.core.params import SamplingParams
    from paceline.core.request_nouns import Admission, Request

SLACK_TOKENS = 64  # room behind a row's limit: drafts of its last passes may exceed it


@dataclass(frozen=True, slots=True, eq=False)
class _RowSampling:
    """Sampling of one row's tokens."""

    request: Request
    kind: ChooseKind
    history: History
    stop_ids: frozenset[int]  # tokens that end its answer, if not banned yet

    def after(self, length: int, guesses: Sequence[int], *, margin: bool = False) -> SamplingSpec:
        """Return the spec of the token after `length` committed ones and some guesses."""
        r, edits = self.request, None
        if not self.history.never_edits:
            edits = self.history.edits(guesses, length - len(r.prompt_ids), self.stop_ids)
        return SamplingSpec(self.kind, r.params, r.seed, r.choice, length + len(guesses), edits, margin)

    def after_each(self, length: int, guesses: Sequence[int], *, margin: bool) -> list[SamplingSpec]:
        """Return the specs after `length` committed tokens, and after each guess. [1 + num_guesses]"""
        if not self.history.never_edits:
            return [self.after(length, guesses[:n], margin=margin) for n in range(len(guesses) + 1)]
        r = self.request
        of_all = self.kind, r.params, r.seed, r.choice
        return [SamplingSpec(*of_all, length + n, None, margin) for n in range(len(guesses) + 1)]


class TokenRows:
    """Tokens, lengths and page tables of rows."""

    def __init__(self, num_rows: int, max_len: int) -> None:
        self.token_ids = np.zeros((num_rows, max_len), np.int64)
        self.length = np.zeros(num_rows, np.int64)  # [num_rows] committed tokens
        self.pages = np.zeros((num_rows, -(-max_len // PAGE_TOKENS)), np.int64)

    @property
    def num_rows(self) -> int:
        """Number of rows, in use or not."""
        return len(self.length)

    @property
    def max_len(self) -> int:
        """Tokens that a row has room for."""
        return self.token_ids.shape[1]

    def known_len(self, row: int) -> int:
        """Return a row's committed tokens."""
        return self.length.item(row)

    def tokens(self, row: int) -> NDArray[int64]:
        """Return a row's committed tokens. [length] int64, a view."""
        return self.token_ids[row, : self.length[row]]

    def page_ids(self, row: int, start: int, end: int) -> list[int]:
        """Return entries `start` to `end` of a row's page table."""
        ids: list[int] = self.pages[row, start:end].tolist()
        return ids

    def written_tokens(self, row: int, start: int, end: int) -> list[int]:
        """Return tokens of a row that were written, committed or not."""
        ids: list[int] = self.token_ids[row, start:end].tolist()
        return ids

    def put_tokens(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Write tokens of a row from its token `start` on."""
        self.token_ids[row, start : start + len(token_ids)] = token_ids

    def set_len(self, row: int, length: int) -> None:
        """Set how many of a row's tokens are committed."""
        self.length[row] = length

    def put_pages(self, row: int, start: int, page_ids: Sequence[int]) -> None:
        """Write entries of a row's page table from `start` on."""
        self.pages[row, start : start + len(page_ids)] = page_ids

    def pack(
        self,
        spans: Sequence[Span],
        wanted: Sequence[int],
        ahead: int = 0,
        *,
        first_keys: Sequence[int] | None = None,
        read_as: NDArray[int64] | None = None,
    ) -> Packed:
        """Pack spans, see `RowView`."""
        ends = [start + num_known + len(guesses) for _, start, num_known, guesses in spans]
        num_tokens = sum(ends) - sum([start for _, start, _, _ in spans])
        num_pages = -(-(max(ends, default=0) + ahead) // PAGE_TOKENS)
        block = np.empty(3 * num_tokens + len(spans) + 1 + sum(wanted), np.int64)
        pages = np.empty((len(spans), num_pages), np.int64)
        kernels.pack_spans(self.token_ids, self.pages, list(spans), list(wanted), num_tokens, block, pages)
        two, three = 2 * num_tokens, 3 * num_tokens
        offsets_end = three + len(spans) + 1
        token_ids = block[:num_tokens]
        return Packed(
            token_ids=token_ids if read_as is None else read_as[token_ids],
            positions=block[num_tokens:two],
            slots=block[two:three],
            cu_len=block[three:offsets_end],
            pages=pages,
            wanted=block[offsets_end:],
            first_keys=None if first_keys is None else np.array(first_keys, np.int64),
        )


class Rows(TokenRows):
    """Rows of an engine: their tokens, requests and sampling.

    A decoding row's newest token has no target KV yet, so its `computed` is `length - 1`.
    """

    late_steps = 0

    def __init__(
        self, num_rows: int, max_len: int, eos_ids: frozenset[int], *, law_needs_probs: bool = False
    ) -> None:
        super().__init__(num_rows, max_len + SLACK_TOKENS)
        self.computed = np.zeros(num_rows, np.int64)  # [num_rows] tokens whose target KV is there
        self.requests: list[Request | None] = [None] * num_rows
        self._sampling: list[_RowSampling | None] = [None] * num_rows
        self._texts: list[kernels.TextIndex | None] = [None] * num_rows
        self._eos_ids = eos_ids
        self.law_needs_probs = law_needs_probs
        self._counted: set[int] = set()  # rows whose tokens are counted, for penalties or a grammar
        self._scoring: set[int] = set()  # rows whose requests ask for scores of their prompts
        self.changing: set[int] = set()  # rows whose drafts may replace the target's choices in their pass
        self.grammars = RowGrammars()

    @property
    def view(self) -> RowView:
        """View for drafters: on a host the rows themselves."""
        return self

    def computed_len(self, row: int) -> int:
        """Return how many of a row's tokens have target KV."""
        return self.computed.item(row)

    def texts(self, rows: Sequence[int]) -> list[kernels.TextIndex]:
        """Return indexes of rows' committed tokens, each made when it is first asked for."""
        texts = [self._texts[row] or self._new_text(row) for row in rows]
        kernels.extend_rows(texts, rows, self.token_ids, self.length)
        return texts

    def _new_text(self, row: int) -> kernels.TextIndex:
        request = self.requests[row]
        assert request is not None
        max_len = len(request.prompt_ids) + max(request.params.max_tokens, 1)
        text = self._texts[row] = kernels.TextIndex(min(max_len, self.max_len))
        return text

    def apply(self, batch: Batch) -> None:
        """Take in the admissions and the new pages of a step."""
        for admission in batch.admissions:
            self._admit(admission)
        for r in batch.rows:
            if r.new_pages:
                self.put_pages(r.row, r.num_kept_pages, r.new_pages)

    def _admit(self, admission: Admission) -> None:
        row, request = admission.row, admission.request
        known, prompt_len = admission.token_ids, len(request.prompt_ids)
        self.put_tokens(row, 0, known)
        self.set_len(row, len(known))
        self.computed[row] = admission.cached_len
        self.put_pages(row, 0, admission.pages)
        self.requests[row] = request
        self.changing.discard(row)
        (self._scoring.add if request.scores_prompt else self._scoring.discard)(row)
        self._texts[row] = None
        if request.params.grammar is not None:
            self.grammars.admit(admission)
        own_stops = frozenset(request.params.stop_token_ids)
        history = History(request.params, request.prompt_ids)
        history.append(known[prompt_len:])
        counts = request.params.grammar is not None or not history.never_edits
        (self._counted.add if counts else self._counted.discard)(row)
        self._sampling[row] = _RowSampling(
            request=request,
            kind=choose_kind(request.params, self.law_needs_probs),
            history=history,
            stop_ids=own_stops if request.params.ignore_eos else own_stops | self._eos_ids,
        )

    # What a target pass reads --------------------------------------------------------------------

    def num_scored(self, batch: Batch) -> Sequence[int]:
        """Return how many known tokens of each row are scored; empty without any. [num_rows]"""
        if not self._scoring:
            return ()
        counts = [r.num_known - r.samples if r.row in self._scoring and not r.decodes else 0 for r in batch.rows]
        return counts if any(counts) else ()

    def params(self, row: int) -> SamplingParams:
        """Return the parameters of a row's request."""
        request = self.requests[row]
        assert request is not None
        return request.params

    def pack_batch(self, batch: Batch, draft: Draft, scored: Sequence[int] = ()) -> Packed:
        """Return the packed tokens of a target pass: each row's known tokens, then its drafts.

        scored: as `num_scored`; these are wanted, too.
        """
        spans = [
            (r.row, self.computed.item(r.row), r.num_known, d.token_ids)
            for r, d in zip(batch.rows, draft.rows, strict=True)
        ]
        wanted = [1 + len(d) if r.samples else 0 for r, d in zip(batch.rows, draft.rows, strict=True)]
        if scored:
            wanted = [own + count for own, count in zip(wanted, scored, strict=True)]
        return self.pack(spans, wanted)

    def specs(self, batch: Batch, draft: Draft, *, masks: bool = False) -> tuple[list[int], list[SamplingSpec]]:
        """Return cu_len and, for every scored position, the spec of the target's token there.

        masks: the pass chooses under masks.
        """
        cu_len, specs = [0], []
        for r, d in zip(batch.rows, draft.rows, strict=True):
            if r.samples:
                of_row = self._target_specs(r.row, d.token_ids, masks=masks)
                specs += of_row
                if d.branches is not None:
                    specs += [of_row[depth] for depth in d.branches.depths(len(d))]
            cu_len.append(len(specs))
        return cu_len, specs

    def _target_specs(self, row: int, guesses: Sequence[int], *, masks: bool) -> list[SamplingSpec]:
        """Return the specs of the target's choices.

        The law `typical` compares probabilities with the likeliest token's, so it needs all logits.
        With a grammar the law chooses, unless the pass takes masks. The law also chooses where edits may ban all
        tokens of a mask, and for log-probabilities: they are of all tokens, and a masked pass scores only some.
        """
        specs = self.row_specs(row, guesses)
        if row not in self.grammars.states:
            return [s._replace(kind="sampled") for s in specs] if row in self.changing else specs
        masks = masks and self.params(row).logprobs is None
        return [s if masks and s.edits is None else s._replace(kind="logits") for s in specs]

    def row_specs(self, row: int, guesses: Sequence[int], *, margin: bool = False) -> list[SamplingSpec]:
        """Return the specs after a row's newest token and after each guess, see `RowView`."""
        sampling = self._sampling[row]
        assert sampling is not None
        return sampling.after_each(self.length.item(row), guesses, margin=margin)

    def spec_after(self, row: int, guesses: Sequence[int]) -> SamplingSpec:
        """Return the spec of the token after a row's committed tokens and some guesses."""
        sampling = self._sampling[row]
        assert sampling is not None
        return sampling.after(self.length.item(row), guesses)

    def penalised(self, row: int) -> bool:
        """Return True if a row's specs depend on which tokens come before them."""
        sampling = self._sampling[row]
        return sampling is not None and sampling.history.penalised

    def may_branch(self, row: int) -> bool:
        """Return True if a row's specs are the same on every path of a tree."""
        return row not in self._counted

    def forced(self, row: int, most: int) -> list[int]:
        """Return up to `most` tokens that a row's grammar forces next."""
        return self.grammars.forced(row, most)

    # Commit --------------------------------------------------------------------------------------

    def chosen_here(self, row: int) -> bool:
        """Return True if the host chooses a row's tokens; its next pass then waits."""
        return True

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        """Append the tokens that each row gained, and advance what is computed."""
        kernels.append_gains(self.token_ids, self.length, self.computed, batch.rows, verdict.rows)
        for r, v in zip(batch.rows, verdict.rows, strict=True) if self._counted else ():
            if r.row in self._counted:
                self.count_tokens(r.row, v.token_ids)

    def count_tokens(self, row: int, token_ids: Sequence[int]) -> None:
        """Count tokens that a row gained for its penalties and its grammar."""
        if self.grammars.states:
            self.grammars.take(row, token_ids)
        sampling = self._sampling[row]
        assert sampling is not None
        if not sampling.history.never_edits:
            sampling.history.append(token_ids)

    def check(self) -> None:
        """Assert that lengths keep within the arrays."""
        assert (self.computed <= self.length).all()
        assert (self.length <= self.token_ids.shape[1]).all()
