"""The seam between the engine and whatever executes a model: `Decoder`; and the target's `Backend` over it."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from paceline.backend.device import usable_cores
from paceline.core.nouns import Scores, Taps, noun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline import kernels
    from paceline.backend.device import Device
    from paceline.backend.packed import Packed
    from paceline.backend.rows import Rows
    from paceline.core.nouns import Batch, Draft, SamplingSpec, Stop, Verdict
    from paceline.model.config import ModelConfig
    from paceline.model.heads.cut_model import SmallModel

MOST_OWN = 2048  # own tokens of all running requests together; a request has some dozens


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(usable_cores())


class KV(Protocol):
    """Keys and values of some of a decoder's layers, by page. Only the decoder that made it looks inside."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all its layers."""
        ...


@noun
class SampledTokens:
    """What a pass says about the tokens that were wanted."""

    token_ids: NDArray[int64]  # [num_wanted]; UNCHOSEN for the kind "logits", may be for "sampled"; or BROKEN
    # [num_logit_rows, vocab_size] raw, of these two kinds only; a drafter may leave out those of "sampled"
    logits: NDArray[floating] | None
    logit_idx: NDArray[int64] | None  # [num_wanted] row of `logits`, -1 where there is none
    taps: Mapping[int, NDArray[floating]] = field(default_factory=dict)  # as `Taps.states`
    margins: NDArray[floating] | None = None  # [num_wanted] logits by which each is ahead, NaN where not known


class StepLimit(NamedTuple):
    """How a row takes part in passes in turn."""

    depth: int  # passes, at most
    stop: Stop | None = None  # where it leaves before
    pointer: kernels.Pointer | None = None  # to what its choices are told, where nothing else edits them


class MultiStep(Protocol):
    """Runs passes one after another, each over the token that the one before chose for its row."""

    def __call__(
        self,
        packed: Packed,
        kv: KV,
        specs: Sequence[SamplingSpec],
        ends: Sequence[StepLimit],
        *,
        num_layers: int | None = None,
        vocab_size: int | None = None,
    ) -> SampledTokens:
        """Run passes for each row, the first over `packed`, which wants the last token of every row.

        ends: how each row takes part. chooses: [sum of depths], a row's one after another, none of the kind
        `logits`; so are the tokens and margins that come back, UNCHOSEN behind
        the last and behind one that is BROKEN. `packed.pages` reach as far as the passes do.
        """
        ...


class Begin(Protocol):
    """Begins a pass that goes on beside the caller."""

    def __call__(
        self, packed: Packed, kv: KV, specs: Sequence[SamplingSpec], *, taps: Sequence[int] = ()
    ) -> Callable[[], SampledTokens]:
        """Begin a pass over all layers, see `Decoder.run`; return what waits for it and says what `run` would.

        Nothing is to touch what it reads before; another pass waits for it.
        """
        ...


class Decoder(Protocol):
    """Executes a model. Holds its weights; all other state is in the stores it makes."""

    name: str  # of the backend it belongs to
    config: ModelConfig

    def describe(self) -> str:
        """Return what it is, in a few words for the user: backend, types, instruction set."""
        ...

    @property
    def beside(self) -> Begin | None:
        """What begins a pass and returns, if it can."""
        ...

    @property
    def in_turn(self) -> MultiStep | None:
        """What runs several passes in one call, if it can."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory."""
        ...

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> KV:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        ...

    def run(
        self,
        packed: Packed,
        kv: KV,
        specs: Sequence[SamplingSpec],
        *,
        num_layers: int | None = None,
        vocab_size: int | None = None,
        taps: Sequence[int] = (),
    ) -> SampledTokens:
        """Run a pass, write its keys and values, and choose a token for each of `packed.wanted`.

        `num_layers` runs only the first layers, for self-drafting. `vocab_size` is the number of token ids to
        choose among, the model's own by default; a drafter passes its target's. `taps` names the layers after
        which the residual stream of every token is handed out, 0 being the embeddings; none twice.
        """
        ...


@noun
class Prepared:
    """A target pass that has not run yet."""

    packed: Packed
    cu_len: Sequence[int]  # as `Scores.cu_len`
    specs: Sequence[SamplingSpec]


class Pending(Protocol):
    """A pass that has been launched."""

    def wait(self) -> Scores:
        """Wait for the pass and return its scores."""
        ...


class _Begun:
    def __init__(self, finish: Callable[[], Scores]) -> None:
        self.wait = finish


class Backend:
    """Executes the target. Owns every row's outcome-dependent state (`rows`) and the target's KV."""

    def __init__(self, decoder: Decoder, rows: Rows, num_pages: int) -> None:
        self.decoder = decoder
        self.config = decoder.config
        self.rows = rows
        self.kv = decoder.new_kv(num_pages)
        self.taps: tuple[int, ...] = ()  # layers whose hidden states drafters read, in every pass

    @property
    def name(self) -> str:
        """What the backend is called."""
        return self.decoder.name

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of target KV per token."""
        return self.kv.bytes_per_token

    @property
    def beside(self) -> bool:
        """Whether a pass that was begun goes on beside the caller."""
        return self.decoder.beside is not None

    def begin(self, batch: Batch, draft: Draft) -> Callable[[], Scores]:
        """Begin a pass over the known tokens and the drafts of a batch, with the taps that are asked for.

        Return what waits for it: it runs then, if not beside the caller. Only rows that choose by `logits` get
        theirs back.
        """
        prepared, begin = self.prepare(batch, draft), self.decoder.beside
        if begin is None:
            return lambda: self.run(prepared)
        finish = begin(prepared.packed, self.kv, prepared.specs, taps=self.taps)
        return lambda: _scores(prepared, finish())

    def launch(self, batch: Batch, draft: Draft) -> Pending:
        """Launch a pass, see `begin`."""
        return _Begun(self.begin(batch, draft))

    def prepare(self, batch: Batch, draft: Draft) -> Prepared:
        """Return all that a pass reads of the rows, as copies."""
        return Prepared(self.rows.pack(batch, draft), *self.rows.specs(batch, draft))

    def run(self, prepared: Prepared) -> Scores:
        """Run a pass that was prepared. Touches no row, so that another thread may do it."""
        return _scores(prepared, self.decoder.run(prepared.packed, self.kv, prepared.specs, taps=self.taps))

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        """Advance the rows by what was kept."""
        self.rows.commit(batch, verdict)


def _scores(prepared: Prepared, chosen: SampledTokens) -> Scores:
    packed = prepared.packed
    taps = Taps(chosen.taps, packed.cu_len, packed.slots) if chosen.taps else None
    return Scores(prepared.cu_len, prepared.specs, chosen.token_ids, chosen.logits, chosen.logit_idx, taps)


class SmallDecoder(Decoder, Protocol):
    """A decoder that writes some of its target's tokens."""

    weight_type: str

    def write_also(self, own_ids: NDArray[int64]) -> None:
        """From now on, write these tokens [n], too, and no others beside the vocabulary."""
        ...


class LoadSmallDecoder(Protocol):
    """Makes a decoder of a model that was cut from the target and shares its tables."""

    def __call__(
        self, small: SmallModel, target: Decoder, device: Device | None, weight_type: str | None
    ) -> SmallDecoder:
        """device: where it runs, None for where the target does."""
        ...
