"""A small language model as drafter whose tokenizer is not the target's.

The drafter keeps each row's text in its own tokens, in pages of its own. If the target chose other tokens than
were guessed, this text is rolled back to the last token border that both texts have (`ForeignRows`).
`retokenize.py` says which drafter tokens stand for the target's text, and which target tokens for guesses.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.backend.sampling import draw
from paceline.backend.seam import PassRequest
from paceline.core.nouns import NO_DRAFT, WHOLE_TEXT, Draft, RowDraft
from paceline.draft.autoregressive import catch_up_tokens, share_out
from paceline.draft.drafter import Needs
from paceline.draft.model.id_map import GREEDY_KIND
from paceline.draft.model.text_window import OwnedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.seam import Decoder, Packed, Span
    from paceline.core.nouns import Batch, Plan, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.draft.drafter import Target
    from paceline.draft.model.retokenize import Retokenizer

PAGES_PER_PAGE = 2  # for each page of the target: a text may have more tokens here; hosts give memory when used


class _Guesses:
    """A row's guesses so far, in both vocabularies."""

    def __init__(self, row: int, retokenizer: Retokenizer, depth: int) -> None:
        self.row, self.depth = row, depth
        self.retokenizer = retokenizer
        self.own_ids: list[int] = []  # the drafter's tokens
        self.token_ids: list[int] = []  # the target's tokens
        self.probs: list[NDArray[floating]] = []  # [vocab] each, if the law needs them

    def add(self, own_id: int) -> None:
        """Take in a guess of the drafter's."""
        self.own_ids.append(own_id)
        self.token_ids = self.retokenizer.read(self.own_ids)

    @property
    def goes_on(self) -> bool:
        """True if another guess is wanted."""
        if self.retokenizer.ended(self.own_ids) or len(self.token_ids) >= self.depth:
            return False
        return len(self.own_ids) < self.depth * self.retokenizer.passes_per_draft

    def draft(self, drafter: str) -> RowDraft:
        """Return the guesses as target tokens, up to one that the target does not have."""
        ids = self.token_ids[: self.depth]
        ids = ids[: ids.index(-1)] if -1 in ids else ids
        probs = np.stack(self.probs[: len(ids)]) if self.probs and ids else None
        return RowDraft(ids, drafter, probs=probs)


class ForeignDraftModel:
    """Drafts with a decoder whose tokens are not the target's."""

    def __init__(
        self,
        name: str,
        target: Target,
        decoder: Decoder,
        new_retokenizer: Callable[[], Retokenizer],
        report: Mapping[str, Any],
        num_layers: int | None = None,
    ) -> None:
        self.name = name
        self._decoder = decoder
        self._num_layers = num_layers
        layers = num_layers or decoder.config.num_layers
        self._allowance = catch_up_tokens(decoder.config, layers, target.config)
        self._new_retokenizer = new_retokenizer
        self._report = report
        self._rows = target.rows
        self._dense = target.law_needs_probs
        pages_per_page = 1 if decoder.capabilities.device else PAGES_PER_PAGE  # a device gives all memory at once
        num_pages, max_len = pages_per_page * target.num_pages, PAGES_PER_PAGE * target.rows.max_len
        self._kv = decoder.new_kv(num_pages, num_layers)
        self._foreign = ForeignRows(target.rows.num_rows, num_pages, min(max_len, decoder.config.max_context))
        self._retokenizers: dict[int, Retokenizer] = {}  # of rows whose text the drafter can follow
        self._waiting: set[int] = set()  # rows that lacked pages and wait for another row to end
        kv_bytes = pages_per_page * self._kv.bytes_per_token
        self.needs = Needs(
            pages="own", kv_bytes_per_token=kv_bytes, reads=WHOLE_TEXT, reads_per_step=self._allowance
        )

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Start from nothing: the drafter's own pages have no cached prefix."""
        self.release(row)
        self._retokenizers[row] = self._new_retokenizer()

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Bring the texts up to date, catch up on them, and draft token by token."""
        depth = {r.row: min(plan.k(r.row), r.max_drafts) for r in batch.rows}
        ready = self._catch_up([row for row, k in depth.items() if k > 0 and self._renew(row, k)])
        guesses = [_Guesses(row, self._retokenizers[row], depth[row]) for row in ready]
        self._draft(guesses)
        for g in guesses:
            self._foreign.guess(g.row, g.own_ids)
        drafts = {g.row: g.draft(self.name) for g in guesses}
        return Draft(tuple(drafts.get(r.row, NO_DRAFT) for r in batch.rows))

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Nothing yet: what was kept is compared when the row drafts next."""

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """No store over the target's page table."""
        return {}

    def release(self, row: int) -> None:
        """Forget the row. Rows that waited for pages begin again."""
        self._waiting.discard(row)
        if self._retokenizers.pop(row, None) is not None:
            self._foreign.release(row)
            while self._waiting:
                self._retokenizers[self._waiting.pop()] = self._new_retokenizer()

    def forget(self) -> None:
        """Nothing is learnt across requests."""

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return self._report

    def _renew(self, row: int, depth: int) -> bool:
        """Bring a row's text up to date. Returns True if it can be drafted for."""
        retokenizer = self._retokenizers.get(row)
        changed = retokenizer.renew(self._rows.tokens(row)) if retokenizer is not None else None
        if retokenizer is None or changed is None:
            return False
        first, token_ids = changed
        room = depth * retokenizer.passes_per_draft
        fits = self._foreign.renew(row, first, token_ids, room)
        if not fits:
            del self._retokenizers[row]
            self._foreign.release(row)
            if first + len(token_ids) + room <= self._foreign.max_len:  # the text only grows, but other rows end
                self._waiting.add(row)
        return fits

    def _catch_up(self, rows: list[int]) -> list[int]:
        """Return the rows whose unseen tokens fit this step's allowance; bring the others nearer."""
        own = self._foreign
        behind = {row: own.known_len(row) - own.start(row) for row in rows}
        ready, nearer = share_out(behind, self._allowance)
        if nearer:
            spans: list[Span] = [(row, self._foreign.start(row), count, ()) for row, count in nearer.items()]
            packed = own.pack(spans, [0] * len(spans))
            self._decoder.launch(PassRequest(packed, self._kv, (), num_layers=self._num_layers)).wait()
        for row, count in nearer.items():
            self._foreign.advance(row, count)
        return ready

    def _draft(self, guesses: Sequence[_Guesses]) -> None:
        """Draw guess after guess. The first pass reads each row's new text, others one guess."""
        own, wanting = self._foreign, list(guesses)
        starts = {g.row: own.start(g.row) for g in guesses}
        spans: list[Span] = [(row, at, own.known_len(row) - at, ()) for row, at in starts.items()]
        while wanting:
            logits = self._run(spans)
            wanting = [g for g, row in zip(wanting, logits, strict=True) if self._extend(g, row) and g.goes_on]
            spans = [(g.row, own.known_len(g.row) + len(g.own_ids) - 1, 0, g.own_ids[-1:]) for g in wanting]

    def _run(self, spans: Sequence[Span]) -> NDArray[floating]:
        """Return the drafter's logits after each span. [num_spans, its vocabulary]"""
        packed = self._foreign.pack(spans, [1] * len(spans))
        wanted = [self._rows.spec_after(row, ())._replace(kind="logits", edits=None) for row, *_ in spans]
        request = PassRequest(packed, self._kv, wanted, num_layers=self._num_layers)
        logits = self._decoder.launch(request).wait().logits
        assert logits is not None
        return logits

    def _extend(self, guesses: _Guesses, logits: NDArray[floating]) -> bool:
        """Draw one more guess from logits [its vocabulary]. Returns True if there is one."""
        choose = self._rows.spec_after(guesses.row, guesses.token_ids)
        dense = self._dense and guesses.retokenizer.has_probs
        if self._dense and not dense:  # a guess without a distribution, as lawful as a lookup's
            choose = choose._replace(kind=GREEDY_KIND, edits=None)
        id_map = guesses.retokenizer.id_map(guesses.own_ids)
        run = partial(id_map.choose, logits[None])
        drawn = draw(run, [choose], [len(guesses.token_ids)], dense=dense)
        if drawn.token_ids[0] < 0:
            return False
        guesses.add(id_map.draft_id(drawn.token_ids[0]))
        guesses.probs += drawn.probs or []
        return True


class ForeignRows:
    """Rows in the drafter's own tokens: texts, pages, and how much is stored."""

    def __init__(self, num_rows: int, num_pages: int, max_len: int) -> None:
        self._rows = OwnedRows(num_rows, max_len, num_pages)
        self.max_len = self._rows.max_len
        self._valid = [0] * num_rows  # leading tokens of each row in the store, guesses included
        self._written = [0] * num_rows  # tokens of each row that were written, guesses included

    def known_len(self, row: int) -> int:
        """Return the length of a row's text."""
        return self._rows.known_len(row)

    def start(self, row: int) -> int:
        """Return a row's first token outside the store; the newest always counts as outside."""
        return min(self._valid[row], self.known_len(row) - 1)

    def pack(self, spans: Sequence[Span], wanted: Sequence[int]) -> Packed:
        """Pack spans of the text and of guesses, see `RowView`."""
        return self._rows.pack(spans, wanted)

    def renew(self, row: int, first: int, token_ids: Sequence[int], room: int) -> bool:
        """Make `token_ids` a row's text from token `first` on; True if `room` more fit.

        Keys and values stay up to the first token that changed: the last border that both texts have.
        """
        length = first + len(token_ids)
        if not self._rows.reserve(row, length + room):
            return False
        known = self._rows.written_tokens(row, first, self._written[row])
        same = next((i for i, (a, b) in enumerate(zip(token_ids, known, strict=False)) if a != b), None)
        kept = min(len(token_ids), len(known)) if same is None else same
        self._valid[row] = min(self._valid[row], first + kept)
        self._rows.put_tokens(row, first, token_ids)
        self._rows.set_len(row, length)
        self._written[row] = length
        return True

    def guess(self, row: int, token_ids: Sequence[int]) -> None:
        """Note guesses behind the text, of which all but the last are in the store."""
        start = self.known_len(row)
        self._rows.put_tokens(row, start, token_ids)
        self._written[row] = start + len(token_ids)
        self._valid[row] = start + len(token_ids) - 1

    def advance(self, row: int, count: int) -> None:
        """Count `count` more tokens as stored."""
        self._valid[row] = self.start(row) + count

    def release(self, row: int) -> None:
        """Forget a row and take its pages back."""
        self._rows.release(row)
        self._valid[row] = self._written[row] = 0

    def check(self, num_pages: int) -> None:
        """Assert that no page is lost or held twice."""
        self._rows.check(num_pages)
        assert all(valid <= written for valid, written in zip(self._valid, self._written, strict=True))
