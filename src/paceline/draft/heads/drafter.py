"""What drafters with a head share: taps in, features kept, entries caught up.

All read the target's hidden states (`needs.taps`) of every committed token and keep two stores over its page
table: those states, and the keys and values of the head's own layers. The entry of a token is (the feature of the
token before it, made of its states; the token itself) and lies in the token's slot, so that a page's entries
depend only on the tokens its hash covers. Entries of guesses are never valid: once the target has kept them, they
are written again from its own features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paceline.core.nouns import NO_DRAFT, Draft
from paceline.draft.autoregressive import CATCH_UP_TOKENS, begin, catch_up_tokens, in_pieces, share_out
from paceline.draft.drafter import Needs
from paceline.draft.heads.entries import Entries
from paceline.draft.heads.features import FeatureStore
from paceline.draft.hints import NO_GAINS, Hints, RecycledGains
from paceline.draft.request_vocabulary import OwnTokens
from paceline.draft.training import trained_to

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.backend.packed import Packed
    from paceline.backend.rows import Span
    from paceline.core.nouns import Batch, Plan, Request, Scores, Verdict
    from paceline.draft.autoregressive import Chain
    from paceline.draft.drafter import Target
    from paceline.draft.heads.options import HeadOptions
    from paceline.model.heads.checkpoint import Head

_MANY_ROWS = 4  # above which a row's drafts do not pay for reading all of its prompt, and for that at once
_NEAR = 256  # entries read then, of all rows together: with 64 of each a pass brings 98 % of what all bring ...
_LEAST_NEAR = 32  # ... and with so few 95 %: a row among many drafts too little to pay for more
_MANY_BEHIND = 16  # entries: more than the drafts of a step leave to be written again
_AT_ONCE = 256  # tokens caught up on in a pass: for more, scratch grows by memory that is slow at first touch


class HeadDrafter:
    """What all kinds share: taps in, features kept, entries caught up."""

    hint_gain: ClassVar[float]
    recycled_gains: ClassVar[RecycledGains] = NO_GAINS

    def __init__(self, options: HeadOptions, target: Target, head: Head) -> None:
        self.name = options.name
        self._options = options
        self._config = head.config
        self._head = target.memory.run_head(head, options.weights)
        self._rows = target.rows
        self._dense = target.law_needs_probs
        fixed = head.token_ids if head.config.own_tokens else np.arange(target.config.vocab_size)
        self._own = OwnTokens(target.rows, fixed, target.config.vocab_size, self._head.write_also)
        self.hints = Hints(target.rows, self.hint_gain, self.recycled_gains)
        self._kv = self._head.new_kv(target.num_pages)
        self._features = FeatureStore(target.rows, target.num_pages, head.config.tapped_size)
        layers = head.config.layers
        self._allowance = catch_up_tokens(layers, layers.num_layers, target.config)
        self._entries = Entries(self._rows, self._features)
        self._feature_store = f"{options.name} features"
        self.needs = Needs(
            pages="shared",
            stores=(options.name, self._feature_store),
            tap_store=self._feature_store,
            kv_bytes_per_token=self._kv.bytes_per_token + self._features.bytes_per_token,
            taps=head.config.taps,
            stops=not self._dense,  # the law's own draws tell of no margins
            trained_to=trained_to(options.folder(target)),
        )

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Start with what the stores already hold of the row's cached pages."""
        self._features.admit(row, valid_lens[self._feature_store])
        self._entries.admit(row, valid_lens[self.name])

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Catch up on known tokens, then draft."""
        depth = {r.row: min(plan.k(r.row), r.max_drafts) for r in batch.rows}
        ready = self._catch_up([row for row, k in depth.items() if k > 0], len(batch.rows))
        starts = {row: self._entries.start(row) for row in ready}
        self._own.follow(starts)
        chains = begin(starts, depth, plan, self.hints)
        if chains:
            self._draft(chains, starts)
        self.hints.note({row: chain.token_ids for row, chain in chains.items()})
        for row in chains:
            self._entries.add(row, self._entries.missing(row))
        return Draft(tuple(chains[r.row].draft(self.name) if r.row in chains else NO_DRAFT for r in batch.rows))

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Keep the states of all tokens that are now committed."""
        self.hints.learn(batch, scores, verdict)
        taps = scores.taps
        assert taps is not None, "the engine tells every pass to hand out what drafters need"
        gained = [
            (r.row, r.num_known + max(0, len(v.token_ids) - 1))
            for r, v in zip(batch.rows, verdict.rows, strict=True)
        ]
        states = [taps.states[layer] for layer in self._config.taps]
        self._features.write(states, taps.cu_len[:-1].tolist(), [count for _, count in gained], taps.slots)
        self._features.add(gained)

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Leading tokens of a row that the stores hold. Entries behind a hole are nobody else's."""
        return {self.name: self._entries.valid_len(row), self._feature_store: self._features.valid_len(row)}

    def release(self, row: int) -> None:
        """Forget the row."""
        self._own.release(row)
        self.hints.release(row)

    def forget(self) -> None:
        """Nothing is learnt across requests."""

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        c = self._config
        return {
            "drafter": self.name,
            "k": self._options.k,
            "model": self._options.model or "ships for this target",
            "taps after layers": " ".join(map(str, c.taps)),
            "tokens": c.draft_vocab_size,
            "of the text besides": "all" if c.own_tokens else "none",
            "weights": f"{self._head.weight_bytes / 2**20:.1f} MiB of {self._head.weight_type}",
        }

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        raise NotImplementedError

    def _catch_up(self, rows: list[int], num_rows: int) -> list[int]:
        """Return those of a step's rows whose missing entries fit its allowance; bring the others nearer.

        Nothing is guessed from a prompt's entries: of those the last layer need only keep keys and values.
        """
        many = num_rows > _MANY_ROWS
        if many:
            for row in rows:
                self._entries.leave_out(row, max(_NEAR // num_rows, _LEAST_NEAR))
        behind = {row: self._entries.missing(row) for row in rows}
        allowance = CATCH_UP_TOKENS if many else self._allowance
        ready, nearer = share_out({row: n for row, n in behind.items() if n > 0}, allowance)
        nearer |= {row: behind[row] - 1 for row in ready if behind[row] > _MANY_BEHIND}
        for piece in in_pieces(nearer, _AT_ONCE):
            spans: list[Span] = [(row, self._entries.start(row), count, ()) for row, count in piece.items()]
            self._head.run(self._pack(spans, [0] * len(spans)), self._read(spans, None), self._kv, ())
            for row, count in piece.items():
                self._entries.add(row, count)
        return ready

    def _pack(self, spans: Sequence[Span], wanted: Sequence[int], ahead: int = 0) -> Packed:
        first = np.array([self._entries.first(row) for row, *_ in spans], np.int64)
        return replace(self._rows.pack_spans(spans, wanted, ahead), first_keys=first)

    def _read(self, spans: Sequence[Span], guessed: Mapping[int, NDArray[floating]] | None) -> NDArray[float32]:
        """Return the features of spans: of known tokens from their states, of guesses `guessed[row]` [width]."""
        states = self._features.read([(row, start - 1, num_known) for row, start, num_known, _ in spans])
        known = self._head.fuse(states)
        if guessed is None:
            return known
        parts, done = [], 0
        for row, _, num_known, guesses in spans:
            parts += [known[done : done + num_known], *(guessed[row][None] for _ in guesses)]
            done += num_known
        return np.concatenate(parts, dtype=np.float32)
