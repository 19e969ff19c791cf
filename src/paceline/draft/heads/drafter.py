"""Draft heads as drafters: EAGLE-1 and EAGLE-3 draft token by token, P-EAGLE all tokens in one pass.

All read the target's hidden states (`needs.taps`) of every committed token and keep two stores over its page
table: the fused features, and the keys and values of the head's own layers. The entry of a token is (the feature
of the token before it, the token itself) and lies in the token's slot, so that a page's entries depend only on
the tokens its hash covers. Entries of guesses are never valid: once the target has kept them, they are written
again from its own features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paceline.core.errors import ConfigError, DrafterMismatch
from paceline.core.nouns import NO_DRAFT, Draft
from paceline.draft.chains import CATCH_UP_TOKENS, begin, catch_up_tokens, draft_in_turn, extend, share_out
from paceline.draft.drafter import MAX_K, Needs
from paceline.draft.heads.checkpoint import load_head, narrowed
from paceline.draft.heads.config import EAGLE, EAGLE3, PEAGLE, head_shapes, read_config
from paceline.draft.heads.features import FeatureStore, Tapped, runs
from paceline.draft.hints import hinted
from paceline.draft.options import bounded
from paceline.draft.own import OwnTokens
from paceline.draft.shipped import shipped_folder
from paceline.draft.training import trained_to
from paceline.model.choosing import pick
from paceline.model.hf import read_json
from paceline.model.pull import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, Choose, Plan, Request, Scores, Taps, Verdict
    from paceline.draft.chains import Chain
    from paceline.draft.drafter import Target
    from paceline.draft.heads.checkpoint import Head
    from paceline.draft.options import Loader
    from paceline.model.backend import Chosen, End
    from paceline.model.packed import Packed
    from paceline.model.rows import Span
    from paceline.model.weights import LoadedModel


_MANY_ROWS = 16  # above which drafts hardly pay, and prompts are caught up on bit by bit
_MANY_BEHIND = 16  # entries: more than the drafts of a step leave to be written again
_MOST_UNFUSED = 256  # tokens: 1.8 MB of hidden states of the default model
_VOCABULARY = 8192  # tokens that EAGLE-1 writes unless told: a larger target head would cost more than the layer


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What the options of all heads share."""

    name: ClassVar[str]
    k: int = 4
    model: str | None = None  # folder or Hugging Face id of the head; None: the one that ships for the target

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)

    def num_weights(self, target: LoadedModel) -> int:
        """Return the size of the head; an embedding of its own is not counted."""
        config = read_config(read_json(self.folder(target) / "config.json"), target.config)
        return sum(prod(shape) for shape in head_shapes(config).values())

    @property
    def stands_alone(self) -> bool:
        """It reads the target's taps and embedding."""
        return False

    def folder(self, target: Target | LoadedModel) -> Path:
        """Return where the head's files lie. Raises `ModelError`, or `ConfigError` if none ships."""
        return resolve(self.model) if self.model else shipped_folder(self.name, target.fingerprint)

    def load(self, target: Target) -> Head:
        """Read the head. Raises `ModelError`, or `DrafterMismatch` if it is not the target's."""
        folder = self.folder(target)
        head = load_head(folder, target.config)
        kind = head.config.algorithm.name
        if kind != self.name:
            raise DrafterMismatch(f"{folder} is a head of another kind; use --draft {kind}:model={folder}")
        return head


@dataclass(frozen=True, slots=True)
class EagleConfig(HeadOptions):
    """`eagle:model=FOLDER`, with `k` drafts per step among the `vocabulary` lowest token ids."""

    name: ClassVar[str] = EAGLE.name
    vocabulary: int | None = None  # None: those that the head's file names, or else a few thousand

    def __post_init__(self) -> None:
        HeadOptions.__post_init__(self)  # super() does not see through slots
        if not self.model:  # nothing here trains one, so none ships
            raise ConfigError(
                f"{self.name} wants model=FOLDER, a head that was trained for this very target; "
                f"`paceline train {EAGLE3.name}` makes a better one, for --draft {EAGLE3.name}:model=FOLDER"
            )

    def build(self, target: Target, load: Loader) -> SerialHeadDrafter:
        """Make the drafter. Raises `ModelError`, or `DrafterMismatch` if the head is not the target's."""
        head, size = self.load(target), target.config.vocab_size
        if self.vocabulary is not None:
            bounded(self, "vocabulary", 1, size)
            head = narrowed(head, self.vocabulary)
        elif head.config.draft_vocab_size == size:
            head = narrowed(head, min(size, _VOCABULARY))
        return SerialHeadDrafter(self, target, head)


@dataclass(frozen=True, slots=True)
class Eagle3Config(HeadOptions):
    """`eagle3` or `eagle3:model=FOLDER`, with `k` drafts per step."""

    name: ClassVar[str] = EAGLE3.name

    def build(self, target: Target, load: Loader) -> SerialHeadDrafter:
        """Make the drafter. Raises `ModelError`, or `DrafterMismatch` if the head is not the target's."""
        return SerialHeadDrafter(self, target, self.load(target))


@dataclass(frozen=True, slots=True)
class PEagleConfig(HeadOptions):
    """`peagle` or `peagle:model=FOLDER`, with `k` drafts per step."""

    name: ClassVar[str] = PEAGLE.name
    k: int = 6

    def build(self, target: Target, load: Loader) -> ParallelHeadDrafter:
        """Make the drafter. Raises `ModelError`, or `DrafterMismatch` if the head is not the target's."""
        return ParallelHeadDrafter(self, target, self.load(target))


class _HeadDrafter:
    """What all kinds share: taps in, features kept, entries caught up."""

    hint_gain: ClassVar[float]

    def __init__(self, options: HeadOptions, target: Target, head: Head) -> None:
        self.name = options.name
        self._options = options
        self._config = head.config
        self._head = target.memory.run_head(head)
        self._rows = target.rows
        self._dense = target.law_needs_probs
        fixed = head.token_ids if head.config.own_tokens else np.arange(target.config.vocab_size)
        self._own = OwnTokens(target.rows, fixed, target.config.vocab_size, self._head.write_also)
        self._kv = self._head.new_kv(target.num_pages)
        self._features = FeatureStore(target.rows, target.num_pages, head.config.layers.hidden_size)
        layers = head.config.layers
        self._allowance = catch_up_tokens(layers, layers.num_layers, target.config)
        self._unfused: list[Tapped] = []  # since features were last read
        self._valid = np.zeros(self._rows.num_rows, np.int64)  # [num_rows] tokens behind the last valid entry
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
        self._valid[row] = valid_lens[self.name]

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Catch up on known tokens, then draft."""
        depth = {r.row: min(plan.k(r.row), r.max_drafts) for r in batch.rows}
        allowance = self._allowance if len(batch.rows) <= _MANY_ROWS else CATCH_UP_TOKENS
        ready = self._catch_up([row for row, k in depth.items() if k > 0], allowance)
        starts = {row: self._start(row) for row in ready}
        self._own.follow(starts)
        chains = begin(self._rows, starts, depth, plan, self.hint_gain)
        if chains:
            self._draft(chains, starts)
        for row in chains:
            self._valid[row] = self._rows.length[row]
        return Draft(tuple(chains[r.row].draft(self.name) if r.row in chains else NO_DRAFT for r in batch.rows))

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Keep the features of all tokens that are now committed."""
        taps = scores.taps
        assert taps is not None, "the engine tells every pass to hand out what drafters need"
        gained = [
            (r.row, r.num_known + max(0, len(v.token_ids) - 1))
            for r, v in zip(batch.rows, verdict.rows, strict=True)
        ]
        places = runs(taps.cu_len[:-1].tolist(), [count for _, count in gained])
        self._unfused.append(self._tapped(taps, places))
        self._features.add(gained)
        if sum(len(tapped.places) for tapped in self._unfused) >= _MOST_UNFUSED:
            self._fuse()

    def _fuse(self) -> None:
        """Make features of what was tapped since they were last read: of many steps at once, as few may draft."""
        parts, self._unfused = self._unfused, []
        if parts:
            self._features.fill(parts, self._head.keep)

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Leading tokens of a row that the stores hold. Entries behind a hole are nobody else's."""
        features = self._features.valid_len(row)
        return {self.name: int(self._valid[row]) if features else 0, self._feature_store: features}

    def release(self, row: int) -> None:
        """Forget the row."""
        self._valid[row] = 0
        self._own.release(row)

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
            "weights": f"{self._head.weight_bytes / 2**20:.1f} MiB",
        }

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        raise NotImplementedError

    def _start(self, row: int) -> int:
        """Return the first token of a row whose entry is still to be made."""
        return max(int(self._valid[row]), self._features.first_entry(row))

    def _catch_up(self, rows: list[int], allowance: int) -> list[int]:
        """Return the rows whose missing entries fit this step's allowance; bring the others nearer.

        Nothing is guessed from a prompt's entries: of those the last layer need only keep keys and values.
        """
        behind = {row: int(self._rows.length[row]) - self._start(row) for row in rows}
        ready, nearer = share_out({row: n for row, n in behind.items() if n > 0}, allowance)
        nearer |= {row: behind[row] - 1 for row in ready if behind[row] > _MANY_BEHIND}
        if nearer:
            spans: list[Span] = [(row, self._start(row), count, ()) for row, count in nearer.items()]
            packed = self._pack(spans, [0] * len(spans))
            self._head.run(packed, self._read(spans, None), self._kv, ())
        for row, count in nearer.items():
            self._valid[row] = self._start(row) + count
        return ready

    def _pack(self, spans: Sequence[Span], wanted: Sequence[int], ahead: int = 0) -> Packed:
        first = np.array([self._features.first_entry(row) for row, *_ in spans], np.int64)
        return replace(self._rows.pack_spans(spans, wanted, ahead), first_keys=first)

    def _read(self, spans: Sequence[Span], guessed: Mapping[int, NDArray[floating]] | None) -> NDArray[float32]:
        """Return the features of spans: kept ones for known tokens, `guessed[row]` [width] for each guess."""
        self._fuse()
        known = self._features.read([(row, start - 1, num_known) for row, start, num_known, _ in spans])
        if guessed is None:
            return known
        parts, done = [], 0
        for row, _, num_known, guesses in spans:
            parts += [known[done : done + num_known], *(guessed[row][None] for _ in guesses)]
            done += num_known
        return np.concatenate(parts, dtype=np.float32)

    def _tapped(self, taps: Taps, places: Sequence[int]) -> Tapped:
        return Tapped(tuple(taps.states[layer] for layer in self._config.taps), places, taps.slots)


class SerialHeadDrafter(_HeadDrafter):
    """Drafts token by token: what the head makes of one entry stands for the feature of the next."""

    hint_gain = 1.5

    def __init__(self, options: HeadOptions, target: Target, head: Head) -> None:
        super().__init__(options, target, head)
        self._fed_back: dict[int, NDArray[floating]] = {}  # row -> [width] of its newest guess

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        at_once = self._run_in_turn if self._head.in_turn else None
        draft_in_turn(self._rows, chains, starts, self._run, at_once, dense=self._dense)

    def _run_in_turn(self, spans: Sequence[Span], chooses: Sequence[Choose], ends: Sequence[End]) -> Chosen:
        assert self._head.in_turn is not None
        packed = self._pack(spans, [1] * len(spans), max(depth for depth, _ in ends) - 1)
        return self._head.in_turn(packed, self._read(spans, None), self._kv, chooses, ends)

    def _run(self, spans: Sequence[Span], chooses: Sequence[Choose]) -> Chosen:
        packed, features = self._pack(spans, [1] * len(spans)), self._read(spans, self._fed_back)
        chosen, fed_back = self._head.run(packed, features, self._kv, chooses)
        self._fed_back = {row: feature for (row, *_), feature in zip(spans, fed_back, strict=True)}
        return chosen


class ParallelHeadDrafter(_HeadDrafter):
    """Drafts all tokens in one pass, mask tokens with a learnt feature standing for those not known yet."""

    hint_gain = 8.0  # it hardly knows what its own guesses were

    def __init__(self, options: HeadOptions, target: Target, head: Head) -> None:
        super().__init__(options, target, head)
        assert head.config.mask_token_id is not None, "the config of a parallel head names it"
        self._mask = head.config.mask_token_id
        self._mask_feature = self._head.fuse(head.weights["mask_hidden"][None])[0]  # [width]

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        chosen, first = self._run(chains, starts)
        wanting = list(chains.values())
        while wanting:
            found = pick(chosen, [first[c.row] + len(c.token_ids) for c in wanting])
            extend(self._rows, wanting, partial(_already, found), dense=self._dense)
            wanting = [c for c in wanting if c.goes_on]

    def _run(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> tuple[Chosen, dict[int, int]]:
        """Run the pass. Returns what it says of all guesses, and where each row's begin.

        Under penalties a choice waits for the guesses before it, as they are counted.
        """
        spans: list[Span] = []
        chooses: list[Choose] = []
        first: dict[int, int] = {}
        for row, start in starts.items():
            guesses = [self._mask] * (chains[row].depth - 1)
            spans.append((row, start, int(self._rows.length[row]) - start, guesses))
            first[row] = len(chooses)
            for choose in hinted(self._rows.row_chooses(row, guesses), chains[row].told):
                waits = self._dense or choose.params.penalised
                chooses.append(choose._replace(kind="logits" if waits else choose.kind, margin=True))
        packed = self._pack(spans, [chains[row].depth for row in starts])
        features = self._read(spans, dict.fromkeys(starts, self._mask_feature))
        return self._head.run(packed, features, self._kv, chooses)[0], first


def _already(found: Chosen, _: Sequence[Choose]) -> Chosen:
    """Stand for a pass that has been run."""
    return found
