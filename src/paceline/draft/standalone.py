"""A small language model as drafter: one of its own, or the target's first layers.

Both run the same autoregressive loop over a `Decoder`. They differ in whose KV they fill: a model of its own keeps
a store over the target's page table and catches up on tokens it has not seen; the target's first layers read and
write the target's own KV, which is always up to date, so they need no memory and no catching up. What they write
at drafted positions the target overwrites with the same values when it scores them.

Tokens are drawn with the noise of the target's own choice (DESIGN section 5): draft and target then agree with
probability at least (1 - TV) / (1 + TV) (Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.nouns import NO_DRAFT, Draft, RowDraft
from paceline.draft.drafter import MAX_K, Needs
from paceline.draft.options import bounded
from paceline.draft.vocabulary import check_vocabulary
from paceline.model.choosing import draw

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, Choose, Plan, Request, Scores, Verdict
    from paceline.draft.drafter import Target
    from paceline.draft.options import Loader
    from paceline.model.backend import KV, Chosen, Decoder
    from paceline.model.packed import Packed
    from paceline.model.rows import Rows, Span

CATCH_UP_TOKENS = 512  # known tokens computed per step for rows that fell behind


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """`draft-model:model=PATH` or `draft-model:layers=N`, with `k` drafts per step."""

    name: ClassVar[str] = "draft-model"
    k: int = 4
    layers: int | None = None  # the target's own first layers
    model: str | None = None  # a model of its own: folder, .gguf or Hugging Face id

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)
        if (self.layers is None) == (self.model is None):
            raise ConfigError("draft-model wants either layers=N (the target's own first layers) or model=PATH")

    def build(self, target: Target, load: Loader) -> DraftModel:
        """Make the drafter. Raises `DrafterMismatch` if the vocabularies do not fit."""
        return self._own_model(self.model, target, load) if self.model else self._own_layers(target)

    def _own_layers(self, target: Target) -> DraftModel:
        most = target.decoder.config.num_layers - 1
        if not 1 <= (self.layers or 0) <= most:
            raise ConfigError(f"draft-model:layers must be between 1 and {most}, not {self.layers}")
        report = {"drafter": self.name, "k": self.k, "model": f"the target's first {self.layers} layers"}
        return DraftModel(target, target.decoder, target.kv, Needs(pages="shared"), report, self.layers)

    def _own_model(self, name: str, target: Target, load: Loader) -> DraftModel:
        drafter = load(name)
        check_vocabulary(target.vocabulary, drafter.vocabulary)
        kv = drafter.decoder.new_kv(target.num_pages)
        needs = Needs(pages="shared", stores=(self.name,), kv_bytes_per_token=kv.bytes_per_token)
        report = {"drafter": self.name, "k": self.k, "model": name}
        return DraftModel(target, drafter.decoder, kv, needs, report)


class DraftModel:
    """Drafts token by token with a decoder of its own or the target's first layers."""

    name = DraftModelConfig.name

    def __init__(
        self,
        target: Target,
        decoder: Decoder,
        kv: KV,
        needs: Needs,
        report: Mapping[str, Any],
        num_layers: int | None = None,
    ) -> None:
        self.needs = needs
        self._decoder = decoder
        self._kv = kv
        self._num_layers = num_layers
        self._report = report
        self._rows: Rows = target.rows
        self._vocab_size = target.decoder.config.vocab_size
        self._dense = target.law_needs_probs
        self._valid = np.zeros(self._rows.num_rows, np.int64)  # tokens of each row in the own store
        self._seen: dict[int, int] = {}  # row -> tokens in the store if every guess of this step is kept

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Start with what the store already holds of the row's cached pages."""
        self._valid[row] = valid_lens.get(self.name, 0)

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Catch up on unseen tokens and draft the first token in one pass, then one pass per further token."""
        depth = {r.row: min(plan.k(r.row), r.max_drafts) for r in batch.rows}
        ready = self._catch_up([row for row, k in depth.items() if k > 0])
        chains = {row: _Chain() for row in ready}
        spans = [self._known_span(row) for row in ready]
        while spans:
            packed = self._rows.pack_spans(spans, [1] * len(spans))
            self._extend(packed, [chains[row] for row, *_ in spans], [row for row, *_ in spans])
            growing = [row for row, *_ in spans if len(chains[row].token_ids) < depth[row]]
            spans = [self._guess_span(row, chains[row]) for row in growing]
        self._seen = {row: int(self._rows.length[row]) + len(c.token_ids) - 1 for row, c in chains.items()}
        return Draft(tuple(chains[r.row].draft() if r.row in chains else NO_DRAFT for r in batch.rows))

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Keep the entries of kept tokens: all but the newest token, as far as they were seen."""
        for row, seen in self._seen.items():
            self._valid[row] = min(seen, int(self._rows.length[row]) - 1)
        self._seen = {}

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Leading tokens of a row that the own store holds, if there is one."""
        return dict.fromkeys(self.needs.stores, int(self._valid[row]))

    def release(self, row: int) -> None:
        """Forget the row."""
        self._valid[row] = 0
        self._seen.pop(row, None)

    def forget(self) -> None:
        """Nothing is learnt across requests."""

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return self._report

    def _start(self, row: int) -> int:
        """Return the first token of a row without KV."""
        valid = self._valid if self.needs.stores else self._rows.computed
        return int(valid[row])

    def _catch_up(self, rows: list[int]) -> list[int]:
        """Return the rows whose unseen tokens fit this step's allowance; bring the others nearer."""
        allowance, ready, spans = CATCH_UP_TOKENS, [], []
        behind = {row: int(self._rows.length[row]) - self._start(row) for row in rows}
        for row in sorted(rows, key=behind.__getitem__):
            if behind[row] <= allowance:
                ready.append(row)
            elif allowance > 0:
                spans.append((row, self._start(row), allowance, ()))
                self._valid[row] += allowance
            allowance -= min(behind[row], allowance)
        if spans:
            self._decoder.run(self._rows.pack_spans(spans, [0] * len(spans)), self._kv, ())
        return ready

    def _extend(self, packed: Packed, chains: list[_Chain], rows: list[int]) -> None:
        def run(chooses: Sequence[Choose]) -> Chosen:
            return self._decoder.run(
                packed, self._kv, chooses, num_layers=self._num_layers, vocab_size=self._vocab_size
            )

        chooses = [self._rows.choose_after(row, c.token_ids) for row, c in zip(rows, chains, strict=True)]
        depths = [len(c.token_ids) for c in chains]
        token_ids, probs = draw(run, chooses, depths, dense=self._dense)
        for index, chain in enumerate(chains):
            chain.token_ids.append(token_ids[index])
            if probs is not None:
                chain.probs.append(probs[index])

    def _known_span(self, row: int) -> Span:
        start = self._start(row)
        return row, start, int(self._rows.length[row]) - start, ()

    def _guess_span(self, row: int, chain: _Chain) -> Span:
        """Return the span of a row's newest guess, which comes after the guesses before it."""
        start = int(self._rows.length[row]) + len(chain.token_ids) - 1
        return row, start, 0, chain.token_ids[-1:]


class _Chain:
    """A row's guesses so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.probs: list[NDArray[floating]] = []  # [vocab] each, if the law needs them

    def draft(self) -> RowDraft:
        probs = np.stack(self.probs) if self.probs else None
        return RowDraft(self.token_ids, DraftModel.name, probs=probs)
