"""A small language model as drafter: its own model, or the target's first layers.

A model whose tokenizer is not the target's is in `cross_vocabulary.py`.

Both run the same autoregressive loop over a `Decoder`. They differ in whose KV they fill: a model of its own keeps
a store over the target's page table and catches up on tokens it has not seen; the target's first layers read and
write the target's own KV, which is always up to date, so they need no memory and no catching up. When the target
scores drafted positions, it overwrites what they wrote there with the same values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from paceline.backend.seam import PassRequest
from paceline.core.errors import ConfigError
from paceline.core.nouns import NO_DRAFT, WHOLE_TEXT, Draft
from paceline.draft.autoregressive import begin, catch_up_tokens, draft_steps, num_same, share_out
from paceline.draft.drafter import MAX_K, Needs
from paceline.draft.hints import USUAL_GAINS, Hints, rule_on_device
from paceline.draft.late import STEP_TOKENS, LateDrafter, may_draft_late
from paceline.draft.model.cross_vocabulary import ForeignDraftModel
from paceline.draft.model.id_map import TranslatedDecoder, difference, map_tokens
from paceline.draft.model.retokenize import RETOKENIZERS, VocabularyPair
from paceline.draft.model.text_window import MAX_WINDOW, MIN_WINDOW, TextWindow
from paceline.draft.registry import bounded
from paceline.draft.request_vocabulary import RequestVocabulary
from paceline.draft.shipped import shipped_folder, trained_to
from paceline.model.config import num_weights
from paceline.model.files.pull import resolve
from paceline.model.heads.cut_model import load_cut_model, num_cut_weights, shares_tables
from paceline.model.weights import load_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.seam import KV, Decoder, LateDecoder, PassResult, RowView, Span, StepLimit
    from paceline.core.nouns import Batch, Plan, SamplingSpec, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.draft.autoregressive import Chain
    from paceline.draft.drafter import Drafter, DraftWeights, Target
    from paceline.draft.registry import Loader
    from paceline.model.weights import LoadedModel

ENOUGH_SHARED = 0.999  # share of the target's tokens that a drafter must have for `tokens` to lose nothing
DRAFT_TOKENS = 32768  # tokens that a whole model writes by default, if its vocabulary has more than twice as many
CUT_GAIN = 4.0  # gain of hints to a model that was cut from the target, see `hints.py`
by_token, by_string = RETOKENIZERS


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """`draft-model`, `draft-model:model=PATH` or `draft-model:layers=N`, with `k` drafts per step.

    With both, the first N layers of that model; with neither, what ships for the target. `vocabulary` says how a
    model drafts for a target with another tokenizer. A model with the target's tokenizer writes the `tokens`
    lowest ids and the request tokens (FR-Spec, arXiv 2502.14856).
    """

    name: ClassVar[str] = "draft-model"
    k: int = 4
    layers: int | None = None  # how many of the first layers; without a model, of the target's own
    model: str | None = None  # a model of its own: folder, .gguf or Hugging Face id
    vocabulary: str | None = None  # a key of RETOKENIZERS; None: as the two tokenizers suggest
    tokens: int | None = None  # of its draft vocabulary; None: `DRAFT_TOKENS`, or all of a small vocabulary
    weights: str | None = None  # their type in memory; None: the backend's usual one for drafters
    max_len: int | None = None  # tokens of its context, see `TextWindow`; None: the whole text

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)
        if self.max_len is not None:
            bounded(self, "max_len", MIN_WINDOW, MAX_WINDOW)
        if self.tokens is not None and self.model is None:
            raise ConfigError(f"{self.name}:tokens goes with model=PATH, a whole model")
        if self.vocabulary is not None and (self.model is None or self.vocabulary not in RETOKENIZERS):
            raise ConfigError(
                f"draft-model:vocabulary goes with model=PATH and is one of {', '.join(RETOKENIZERS)}"
            )

    def num_weights(self, target: LoadedModel) -> int:
        """Return the model's own size; the target's layers and tables cost nothing."""
        if self.layers is not None and self.model is None:
            return 0
        folder = resolve(self.model) if self.model else shipped_folder(self.name, target.fingerprint)
        if shares_tables(folder):
            return num_cut_weights(folder)
        config = load_model(folder).config
        return num_weights(replace(config, num_layers=self.layers or config.num_layers))

    @property
    def keeps_for_pages(self) -> bool:
        """True of a model of its own that reads the whole text."""
        return (self.layers is None or self.model is not None) and self.max_len is None

    @property
    def stands_alone(self) -> bool:
        """True of a whole model: cut models need the target's tables, target layers its KV."""
        return self.model is not None and not shares_tables(Path(self.model))

    @property
    def reads(self) -> str:
        """Say what the target's own layers read; tables can be loaded once more elsewhere."""
        return "the target's keys and values" if self.layers is not None and self.model is None else ""

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter. Raises `ConfigError`."""
        if self.layers is not None and self.model is None:
            self._refuse("weights", "the target's own layers have the type that --weights says")
            self._refuse("max_len", "the target's own layers read the target's KV")
            return self._own_layers(target)
        folder = Path(self.model) if self.model else shipped_folder(self.name, target.fingerprint)
        if self.model is None or shares_tables(folder):
            self._refuse("tokens", "its file names the tokens that it writes")
            return self._cut_model(folder, target)
        return self._own_model(self.model, target, load)

    def _refuse(self, option: str, why: str) -> None:
        """Raise `ConfigError` if an option is given that means nothing here."""
        if (value := getattr(self, option)) is not None:
            raise ConfigError(f"leave out {self.name}:{option}={value}: {why}")

    def _check_layers(self, num_layers: int) -> None:
        if self.layers is not None and not 1 <= self.layers <= num_layers:
            raise ConfigError(f"draft-model:layers must be between 1 and {num_layers}, not {self.layers}")

    def _own_layers(self, target: Target) -> Drafter:
        self._check_layers(target.config.num_layers - 1)
        if target.rows.late_steps:  # guesses would overwrite KV of tokens that are committed and not known yet
            raise ConfigError(f"{self.name}:layers={self.layers} needs a backend that knows its rows at once")
        report = {"drafter": self.name, "k": self.k, "model": f"the target's first {self.layers} layers"}
        memory = target.memory
        needs = Needs(pages="shared", stops=not target.law_needs_probs)
        if may_draft_late(memory.decoder, target):
            late = replace(needs, late=True)
            return late_drafter(target, memory.decoder, memory.kv, late, report, self.layers, hint_gain=CUT_GAIN)
        drafter = DraftModel(target, memory.decoder, memory.kv, needs, report, self.layers)
        drafter.hints.gain = CUT_GAIN
        return drafter

    def _cut_model(self, folder: Path, target: Target) -> Drafter:
        """Return a model that was cut from the target and shares its tables."""
        cut = load_cut_model(folder, target.config)
        self._check_layers(cut.config.num_layers)
        decoder = target.memory.run_cut_model(cut, self.weights)
        model = self.model or "ships for this target"
        report = {"drafter": self.name, "k": self.k, "model": model, "weights": decoder.weight_type}
        vocabulary = RequestVocabulary(
            target.rows, cut.token_ids, target.config.vocab_size, decoder.set_request_tokens
        )
        kept = trained_to(folder)
        return self._over_shared_pages(target, decoder, report, kept, vocabulary=vocabulary, hint_gain=CUT_GAIN)

    def _own_model(self, name: str, target: Target, load: Loader) -> Drafter:
        drafter = load(name, self.weights)
        self._check_layers(drafter.decoder.config.num_layers)
        report: dict[str, Any] = {"drafter": self.name, "k": self.k, "model": name}
        if self.layers is not None:
            report["layers"] = self.layers
        decoder = drafter.decoder
        if self.vocabulary is not None or difference(target.vocabulary, drafter.vocabulary) is not None:
            tokens = map_tokens(target.vocabulary, drafter.vocabulary)
            way = self.vocabulary or (by_token if tokens.share >= ENOUGH_SHARED else by_string)
            self._refuse("tokens", "a drafter with another vocabulary writes all of its tokens")
            report["vocabulary"] = f"{way}: the drafter has {tokens.share:.1%} of the target's tokens"
            if way != by_token or not tokens.is_total:
                self._refuse("max_len", "a drafter with another vocabulary has a text of its own already")
                pair = VocabularyPair(target.vocabulary, drafter.vocabulary, tokens)
                new_retokenizer = partial(RETOKENIZERS[way], pair)
                return ForeignDraftModel(self.name, target, decoder, new_retokenizer, report, self.layers)
            decoder = TranslatedDecoder(decoder, tokens)  # one token for each of the target's: shared pages
            return self._over_shared_pages(target, decoder, report, read_as=decoder.read_as)
        size = min(target.config.vocab_size, decoder.config.vocab_size)
        if (num_tokens := self._num_tokens(size, drafter)) == size:
            return self._over_shared_pages(target, decoder, report)
        assert drafter.narrow
        narrow = drafter.narrow(np.arange(num_tokens))
        report |= {"tokens": num_tokens, "weights": narrow.weight_type}
        written = np.r_[:num_tokens, size : target.config.vocab_size]  # with padding, which no model writes
        own = RequestVocabulary(target.rows, written, target.config.vocab_size, narrow.set_request_tokens)
        return self._over_shared_pages(target, narrow, report, vocabulary=own)

    def _num_tokens(self, size: int, drafter: DraftWeights) -> int:
        """Return the size of the draft vocabulary, of `size` tokens at most."""
        if drafter.narrow is None:
            self._refuse("tokens", "drafters on this backend write all tokens")
            return size
        if self.tokens is not None:
            bounded(self, "tokens", 1, size)
            return self.tokens
        return DRAFT_TOKENS if size > 2 * DRAFT_TOKENS else size

    def _over_shared_pages(
        self,
        target: Target,
        decoder: Decoder,
        report: Mapping[str, Any],
        kept: tuple[float, ...] = (),
        *,
        vocabulary: RequestVocabulary | None = None,
        read_as: NDArray[int64] | None = None,
        hint_gain: float = 0.0,
    ) -> Drafter:
        stops = not target.law_needs_probs
        new = partial(DraftModel, target, decoder, vocabulary=vocabulary, read_as=read_as)
        if self.max_len is not None:
            window = self._window(target, decoder, self.max_len)
            kv = decoder.new_kv(window.num_pages, self.layers)
            state = window.bytes_per_row(kv)
            needs = Needs(pages="own", bytes_per_row=state, reads=self.max_len, stops=stops, trained_to=kept)
            drafter = new(kv, needs, {**report, "max_len": self.max_len}, self.layers)
            drafter.read_only(window)
            drafter.hints.gain = hint_gain
            return drafter
        kv = decoder.new_kv(target.num_pages, self.layers)
        needs = Needs(
            pages="shared",
            stores=(self.name,),
            kv_bytes_per_token=kv.bytes_per_token,
            reads=WHOLE_TEXT,
            stops=stops,
            trained_to=kept,
        )
        if read_as is None and not target.apart and may_draft_late(decoder, target):
            late = replace(needs, late=True, reads_per_step=STEP_TOKENS)
            return late_drafter(target, decoder, kv, late, report, self.layers, vocabulary, hint_gain=hint_gain)
        drafter = new(kv, needs, report, self.layers)
        drafter.hints.gain = hint_gain
        return drafter

    def _window(self, target: Target, decoder: Decoder, max_len: int) -> TextWindow:
        """Return the last `max_len` tokens of each of the target's rows."""
        most = decoder.config.max_context
        if max_len > most:
            raise ConfigError(f"{self.name}:max_len={max_len}: the model was made for {most} tokens")
        most_pages = None
        if decoder.capabilities.device:  # a device gives all memory at once: pages for all texts, and drafts
            most_pages = target.num_pages + target.rows.num_rows
        return TextWindow(target.rows, max_len, most_pages)


def late_drafter(
    target: Target,
    decoder: Decoder,
    kv: KV,
    needs: Needs,
    report: Mapping[str, Any],
    num_layers: int | None,
    vocabulary: RequestVocabulary | None = None,
    *,
    hint_gain: float,
) -> LateDrafter:
    """Return a drafter whose passes need not know what the last ones committed."""
    hints, size = rule_on_device(hint_gain, USUAL_GAINS), target.config.vocab_size
    program = cast("LateDecoder", decoder).late_program(
        target.rows, kv, num_layers, size, hints, own_store=bool(needs.stores)
    )
    return LateDrafter(DraftModelConfig.name, needs, report, program, target.rows, vocabulary)


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
        *,
        vocabulary: RequestVocabulary | None = None,
        read_as: NDArray[int64] | None = None,
    ) -> None:
        """vocabulary: of a decoder that writes some of the target's tokens only. read_as: see `RowView.pack`."""
        self._decoder = decoder
        self._kv = kv
        self._num_layers = num_layers
        self._report = report
        self._rows: RowView | TextWindow = target.rows
        self._window: TextWindow | None = None  # None: it reads whole texts
        self.hints = Hints(target.rows, 0.0, USUAL_GAINS)  # a whole model reads the text for itself
        self._vocab_size = target.config.vocab_size
        self._dense = target.law_needs_probs
        layers = num_layers or decoder.config.num_layers
        self._allowance = catch_up_tokens(decoder.config, layers, target.config)
        self.needs = replace(needs, reads_per_step=self._allowance)
        self._vocabulary = vocabulary
        self._read_as = read_as
        self._valid = [0] * target.rows.num_rows  # tokens of each row in the own store
        self._seen: dict[int, tuple[int, Sequence[int]]] = {}  # row -> its length, open guesses in the store

    def read_only(self, window: TextWindow) -> None:
        """Read the ends of texts only; its KV is for these."""
        self._rows = self._window = window

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Start with what the store already holds of the row's cached pages."""
        self._valid[row] = valid_lens.get(self.name, 0)
        if self._window:
            self._window.release(row)

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Catch up and draft the first token in one pass, then one step per token."""
        depth = {r.row: min(plan.k(r.row), r.max_drafts) for r in batch.rows}
        ready = self._catch_up([row for row, k in depth.items() if k > 0])
        starts = {row: self._start(row) for row in ready}
        if self._vocabulary:
            self._vocabulary.follow(starts)
        chains = begin(starts, depth, plan, self.hints)
        all_steps = self._run_steps if self._decoder.capabilities.multi_step else None
        draft_steps(self._rows, chains, starts, self._run, all_steps, dense=self._dense)
        self._seen |= {row: (self._rows.known_len(row), self._stored(c)) for row, c in chains.items()}
        self.hints.note({row: chain.token_ids for row, chain in chains.items()})
        return Draft(tuple(chains[r.row].draft(self.name) if r.row in chains else NO_DRAFT for r in batch.rows))

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Keep the entries of kept tokens that were seen, without the newest token's.

        A token that a grammar put in a guess's place may be kept, but the model has not seen it.
        """
        self.hints.learn(batch, scores, verdict)
        for r, v in zip(batch.rows, verdict.rows, strict=True):
            if r.row in self._seen:
                length, guesses = self._seen.pop(r.row)
                seen = length + num_same(guesses, v.token_ids)
                self._valid[r.row] = min(seen, self._rows.known_len(r.row) - 1)

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Leading tokens of a row that the own store holds, if there is one."""
        return dict.fromkeys(self.needs.stores, self._valid[row])

    def release(self, row: int) -> None:
        """Forget the row."""
        self._valid[row] = 0
        if self._vocabulary:
            self._vocabulary.release(row)
        self.hints.release(row)
        self._seen.pop(row, None)
        if self._window:
            self._window.release(row)

    def forget(self) -> None:
        """Nothing is learnt across requests."""

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return self._report

    def _stored(self, chain: Chain) -> Sequence[int]:
        """Return the stored guesses that the target may accept; none with late rows."""
        return () if self._rows.late_steps else chain.token_ids[:-1]

    def _start(self, row: int) -> int:
        """Return the first token of a row without KV."""
        if self.needs.has_state:
            return self._valid[row]
        assert not isinstance(self._rows, TextWindow)
        return self._rows.computed_len(row)

    def _catch_up(self, rows: list[int]) -> list[int]:
        """Return the rows whose unseen tokens fit this step's allowance; bring the others nearer."""
        if self._window:
            moved, fit = (set(filter(of, rows)) for of in (self._window.follow, self._window.has_room))
            for row in moved | (set(rows) - fit):
                self._valid[row] = 0
            rows = [row for row in rows if row in fit]
        behind = {row: self._rows.known_len(row) - self._start(row) for row in rows}
        ready, nearer = share_out(behind, self._allowance)
        if nearer:
            spans: list[Span] = [(row, self._start(row), count, ()) for row, count in nearer.items()]
            self._launch(spans, [0] * len(spans), ())
        for row, count in nearer.items():
            self._valid[row] += count
        return ready

    def _run(self, spans: Sequence[Span], specs: Sequence[SamplingSpec]) -> PassResult:
        return self._launch(spans, [1] * len(spans), specs)

    def _run_steps(
        self, spans: Sequence[Span], specs: Sequence[SamplingSpec], steps: Sequence[StepLimit]
    ) -> PassResult:
        return self._launch(spans, [1] * len(spans), specs, steps, max(limit.depth for limit in steps) - 1)

    def _launch(
        self,
        spans: Sequence[Span],
        wanted: Sequence[int],
        specs: Sequence[SamplingSpec],
        steps: Sequence[StepLimit] = (),
        ahead: int = 0,
    ) -> PassResult:
        packed = self._rows.pack(spans, wanted, ahead, read_as=self._read_as)
        layers, vocab = self._num_layers, self._vocab_size
        request = PassRequest(packed, self._kv, specs, steps, num_layers=layers, vocab_size=vocab)
        return self._decoder.launch(request).wait()
