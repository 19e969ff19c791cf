"""Drafters with a head: taps in, entries caught up.

All heads read the target's hidden states (`needs.taps`) of every committed token. They keep two stores over its
page table: these states, and the keys and values of the head's own layers. The entry of a token is made of the
feature of the token before it and of the token itself; a block head's, of the token's own feature. It lies in the
token's slot, so a page's entries depend only on the tokens that its hash covers. Entries of guesses are never
valid: once the target has kept a guess, its entry is written again from the target's features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paceline.backend.seam import Features, PassRequest
from paceline.core.nouns import NO_DRAFT, Draft
from paceline.draft.autoregressive import CATCH_UP_TOKENS, begin, catch_up_tokens, in_pieces, share_out
from paceline.draft.heads.asked_head import feature_store, head_needs, head_report
from paceline.draft.hints import NO_GAINS, Hints, RecycledGains, rule_on_device
from paceline.draft.request_vocabulary import RequestVocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backend.seam import FedBack, HeadRunner, HintRule, RowView, Span, StepLimit
    from paceline.core.nouns import Batch, Plan, SamplingSpec, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.draft.autoregressive import Chain
    from paceline.draft.drafter import Target
    from paceline.draft.heads.asked_head import AskedHead
    from paceline.model.heads.checkpoint import Head

_MANY_ROWS = 4  # with more, a row's drafts do not pay for reading its whole prompt, nor for reading it at once
_NEAR = 256  # entries that all rows together read then: with 64 a row, a pass brings 98 % of what all bring ...
_LEAST_NEAR = 32  # ... and least entries of a row: 95 %. A row among many drafts too little to pay for more
_MANY_BEHIND = 16  # more missing entries than a step's drafts leave to write again: they get passes of their own
_KEEP_FACTOR = 4  # so many times as many entries are made if a row would otherwise lose entries that it has
_AT_ONCE = 256  # most tokens to catch up on in a pass: for more, scratch memory grows, slow at first touch


class HeadDrafter:
    """Base of all kinds of heads: taps in, entries caught up."""

    hint_gain: ClassVar[float]
    recycled_gains: ClassVar[RecycledGains] = NO_GAINS
    entries_lag: ClassVar[int] = 0  # newest known tokens that have no entry yet

    def __init__(self, asked: AskedHead, target: Target, head: Head, runner: HeadRunner) -> None:
        self.name = asked.name
        self._asked = asked
        self._config = head.config
        self._head = runner
        self._rows = target.rows
        self._dense = target.law_needs_probs
        fixed = head.token_ids if head.config.request_tokens else np.arange(target.config.vocab_size)
        self._vocabulary = RequestVocabulary(
            target.rows, fixed, target.config.vocab_size, self._head.set_request_tokens
        )
        self.hints = Hints(target.rows, self.hint_gain, self.recycled_gains)
        self._kv = self._head.new_kv(target.num_pages + head.config.spare_pages(target.rows.num_rows))
        self._taps = self._head.new_tap_store(target.num_pages)
        self._tapped = TappedRuns(target.rows)
        layers = head.config.layers
        self._allowance = catch_up_tokens(layers, layers.num_layers, target.config)
        self._entries = Entries(self._rows, self._tapped, self.entries_lag)
        self._feature_store = feature_store(asked.name)
        stops = not self._dense  # the law's own draws have no margins
        self.needs = head_needs(asked, head, self._kv, self._taps, stops=stops)

    @classmethod
    def late_rule(cls) -> HintRule:
        """Return the rule of its hints on the target's device."""
        return rule_on_device(cls.hint_gain, cls.recycled_gains)

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Start with what the stores already hold of the row's cached pages."""
        self._tapped.admit(row, valid_lens[self._feature_store])
        self._entries.admit(row, valid_lens[self.name])

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Catch up on known tokens, then draft."""
        depth = {r.row: min(plan.k(r.row), r.max_drafts, self.needs.max_k) for r in batch.rows}
        ready = self._catch_up([row for row, k in depth.items() if k > 0], len(batch.rows))
        starts = {row: self._entries.start(row) for row in ready}
        self._vocabulary.follow(starts)
        chains = begin(starts, depth, plan, self.hints, self.needs.branches)
        if chains:
            self._draft(chains, starts)
        self.hints.note({row: chain.token_ids for row, chain in chains.items()})
        for row in chains:
            self._entries.complete(row)
        return Draft(tuple(chains[r.row].draft(self.name) if r.row in chains else NO_DRAFT for r in batch.rows))

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Keep the taps of all tokens that are now committed."""
        self.hints.learn(batch, scores, verdict)
        taps = scores.taps
        assert taps is not None, "every target pass hands out the taps that drafters need"
        counts = [
            r.num_known + max(0, len(v.token_ids) - 1) for r, v in zip(batch.rows, verdict.rows, strict=True)
        ]
        self._taps.write(taps, counts)
        self._tapped.add([r.row for r in batch.rows], taps.starts, counts)

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Return a row's leading tokens in the stores; entries behind a hole stay private."""
        return {self.name: self._entries.valid_len(row), self._feature_store: self._tapped.valid_len(row)}

    def release(self, row: int) -> None:
        """Forget the row."""
        self._vocabulary.release(row)
        self.hints.release(row)

    def forget(self) -> None:
        """Nothing is learnt across requests."""

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return head_report(self._asked, self._config, self._head)

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        raise NotImplementedError

    def _catch_up(self, rows: list[int], num_rows: int) -> list[int]:
        """Return the rows whose missing entries fit the step's allowance; bring the others nearer.

        Nothing is guessed from a prompt's entries: of those the last layer need only keep keys and values.
        """
        many = num_rows > _MANY_ROWS
        if many:
            for row in rows:
                self._entries.leave_out(row, max(_NEAR // num_rows, _LEAST_NEAR))
        # The other rows lack taps, or their newest token was read already.
        behind = {row: n for row in rows if (n := self._entries.missing(row)) + self.entries_lag > 0}
        allowance = CATCH_UP_TOKENS if many else self._allowance
        ready, nearer = share_out(behind, allowance)
        nearer |= {row: behind[row] - 1 for row in ready if behind[row] > _MANY_BEHIND}
        for piece in in_pieces(nearer, _AT_ONCE):
            self._make_entries(piece)
        return ready

    def _make_entries(self, counts: Mapping[int, int]) -> None:
        """Make the next `counts[row]` entries of some rows."""
        spans: list[Span] = [(row, self._entries.start(row), count, ()) for row, count in counts.items()]
        self._head.launch(self._request(spans, [0] * len(spans), ())).wait()
        for row, count in counts.items():
            self._entries.add(row, count)

    def _request(
        self,
        spans: Sequence[Span],
        wanted: Sequence[int],
        specs: Sequence[SamplingSpec],
        steps: Sequence[StepLimit] = (),
        fed_back: FedBack | None = None,
        ahead: int = 0,
    ) -> PassRequest:
        """Return a pass over rows' entries. Guesses in spans read feedback or the mask feature."""
        first_keys = [self._entries.first(row) for row, *_ in spans]
        before = 1 - self.entries_lag  # tokens by which the feature that an entry reads lies before the entry
        pieces = [(index, start - before, known) for index, (_, start, known, _) in enumerate(spans) if known]
        return PassRequest(
            self._rows.pack(spans, wanted, ahead, first_keys=first_keys),
            self._kv,
            specs,
            steps,
            features=Features(self._taps, pieces, fed_back),
        )


# Features and entries of each row: which of them are there. The arrays are the backend's. --------


class TappedRuns:
    """Tokens of each row whose taps are kept: an unbroken run up to the newest.

    Taps can only be had when the target computes their token. Where they were not taken then (a cached page from a
    time without the head, a pass whose taps were lost) there is a hole, and the run begins behind it.
    """

    def __init__(self, rows: RowView) -> None:
        self._rows = rows
        self._begin = [0] * rows.num_rows  # first token of each row's run ...
        self._end = [0] * rows.num_rows  # ... and the token behind its last

    def admit(self, row: int, valid_len: int) -> None:
        """Start with the taps of a row's cached pages, if they reach its last token."""
        computed = self._rows.computed_len(row)
        self._begin[row] = 0 if valid_len >= computed else computed
        self._end[row] = computed

    def add(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Note that `counts[i]` taps of row `rows[i]` from `starts[i]` were kept. No row twice."""
        for row, start, count in zip(rows, starts, counts, strict=True):
            if start != self._end[row]:  # the taps between are lost
                self._begin[row] = start
            self._end[row] = start + count

    def first_entry(self, row: int) -> int:
        """Return the first token from which on all predecessors have taps, or length + 1."""
        length = self._rows.known_len(row)
        return self._begin[row] + 1 if self._end[row] >= length - 1 else length + 1

    def valid_len(self, row: int) -> int:
        """Return a row's leading tokens whose taps are all there; 0 behind a hole."""
        return self._end[row] if self._begin[row] == 0 else 0


class Entries:
    """Entries of each row in the head's store: an unbroken run and its end.

    The run begins at the row's first entry. If there is a hole in the taps, or if entries were left out because
    drafts would not pay for them, it begins behind these.
    """

    def __init__(self, rows: RowView, tapped: TappedRuns, lag: int = 0) -> None:
        """lag: newest known tokens without an entry; 1 for a block head."""
        self._rows, self._tapped, self._lag = rows, tapped, lag
        self._left_out = [0] * rows.num_rows  # tokens of each row before the first one whose entry is made
        self._end = [0] * rows.num_rows  # the token behind the last entry that is valid

    def admit(self, row: int, valid_len: int) -> None:
        """Start with the entries of a row's cached pages."""
        self._left_out[row], self._end[row] = 0, valid_len

    def first(self, row: int) -> int:
        """Return the first token of a row whose entry is read."""
        return max(self._left_out[row], self._tapped.first_entry(row) - self._lag)

    def start(self, row: int) -> int:
        """Return the first token of a row whose entry is still to be made."""
        return max(self._end[row], self.first(row))

    def missing(self, row: int) -> int:
        """Return how many entries are still to be made."""
        return self._rows.known_len(row) - self._lag - self.start(row)

    def leave_out(self, row: int, num_kept: int) -> None:
        """Make only the last `num_kept` of a row's missing entries; earlier ones are never read.

        Up to `_KEEP_FACTOR` times as many are made if the row would otherwise lose entries that it has. Behind
        left-out entries a head's second layer has less context, also in a page that another row shares: that row's
        drafts may be a little worse, its text is the same.
        """
        first, length = self.first(row), self._rows.known_len(row)
        start = max(self._end[row], first)
        if length - self._lag - start > max(num_kept, min(start - first, _KEEP_FACTOR * num_kept)):
            self._left_out[row] = length - num_kept

    def add(self, row: int, count: int) -> None:
        """Note that `count` more entries were made."""
        self._end[row] = self.start(row) + count

    def complete(self, row: int) -> None:
        """Note that all missing entries were made."""
        self._end[row] = self._rows.known_len(row) - self._lag

    def valid_len(self, row: int) -> int:
        """Return the leading tokens whose entries are there and depend on nothing else."""
        whole = self._left_out[row] == 0 and self._tapped.valid_len(row) > 0
        return self._end[row] if whole else 0
