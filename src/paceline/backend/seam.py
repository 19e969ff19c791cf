"""The seam between engine and backends: one way to run passes, and a row view.

    pending = executor.launch(PassRequest(packed, kv, specs))    the pass may go on beside the caller
    result = pending.wait()                                      PassResult

Targets, draft models and draft heads are launched like this. Arrays in requests and results are the backend's own:
numpy on a host, handles elsewhere. Only token ids, logits and margins are always numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float64, floating, int64
    from numpy.typing import NDArray

    from paceline import kernels
    from paceline.backend.device import Device
    from paceline.core.nouns import SamplingSpec, Stop, Taps
    from paceline.model.config import ModelConfig
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.config import HeadConfig
    from paceline.model.heads.cut_model import CutModel

    Span = tuple[int, int, int, Sequence[int]]  # (row, start, num_known, guesses)

MAX_REQUEST_TOKENS = 2048  # most request tokens of a draft vocabulary; one request adds some dozens

# A pass ------------------------------------------------------------------------------------------


@noun
class Packed:
    """Tokens of one pass, with their places in the texts and in the KV store.

    Row i of the pass owns tokens cu_len[i]:cu_len[i + 1], at consecutive positions. Token t attends to its row's
    slots at positions first_keys[i]..positions[t], its own included: K and V are written before they are read.
    The slot of a position p of row i is `pages[i, p // 16] * 16 + p % 16`. A backend with handles of its own
    takes numpy arrays, too. A branch of a draft is a row of its own, see `branches.py`.
    """

    token_ids: NDArray[int64]  # [num_tokens]
    positions: NDArray[int64]  # [num_tokens] place in the text, for RoPE and the causal mask
    slots: NDArray[int64]  # [num_tokens] where K and V are written
    cu_len: NDArray[int64]  # [num_rows + 1]
    pages: NDArray[int64]  # [num_rows, max_pages] page ids, padded with 0
    wanted: NDArray[int64]  # [num_wanted] indices of the tokens whose hidden state is returned
    first_keys: NDArray[int64] | None = None  # [num_rows] position of the first key that a row sees; None: all 0
    copies: NDArray[int64] | None = (
        None  # [num_copies, 2] (token, further slot for its K and V); None: no row is a branch
    )

    def check(self, num_slots: int, vocab_size: int) -> None:
        """Assert shapes and ranges."""
        num_tokens = len(self.token_ids)
        assert self.cu_len[0] == 0
        assert self.cu_len[-1] == num_tokens == len(self.positions) == len(self.slots)
        assert len(self.pages) == len(self.cu_len) - 1
        assert ((0 <= self.token_ids) & (self.token_ids < vocab_size)).all()
        assert ((0 <= self.slots) & (self.slots < num_slots)).all()
        assert ((0 <= self.wanted) & (self.wanted < num_tokens)).all()


class KV(Protocol):
    """Keys and values of some decoder layers, by page. Only that decoder reads them."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all its layers."""


class StepLimit(NamedTuple):
    """Limits of one row in a pass of several steps."""

    depth: int  # most steps
    stop: Stop | None = None  # ends the row earlier
    pointer: kernels.TokenHints | None = None  # adds logits to hinted tokens, the only edit of these choices


class FedBack(NamedTuple):
    """Outputs of a head's last step: features of its newest guesses, or corrector states."""

    hidden: object  # `PassResult.hidden` of that step
    rows: Sequence[int]  # [num_guesses of the pass] row of `hidden` that each guess reads


@noun
class Features:
    """Features [num_tokens, width] that a head reads beside its tokens.

    A token reads the feature of the token before it. For committed tokens it is made of taps; guesses read what is
    fed back, or the mask feature. A block head stores context with each token's own feature; blocks have none.
    """

    taps: TapStore
    pieces: Sequence[tuple[int, int, int]]  # (row of the pass, first token whose taps are read, tokens), in order
    fed_back: FedBack | None = None


@noun
class PassRequest:
    """One pass, or several steps in one call.

    `steps` runs several: each chooses a token for every row that takes part, and the next reads it. The first
    reads `packed`, which wants the last token of each row (a block head: the places of all guesses).
    `packed.pages` must hold the tokens of all steps. No spec of several steps is of kind `logits`.
    """

    packed: Packed
    kv: KV
    specs: Sequence[SamplingSpec]  # [num_wanted]; with `steps` [sum of depths], a row's one after another
    steps: Sequence[StepLimit] = ()  # [num_rows of the pass]; empty: one step
    num_layers: int | None = None  # number of first layers to run; None: all
    vocab_size: int | None = None  # token ids to choose among; None: the model's own
    taps: Sequence[int] = ()  # layers after which the residual stream is handed out, 0: embeddings; none twice
    features: Features | None = None  # features of a head's pass
    masks: kernels.Masks | None = None  # masks of the wanted tokens, if the executor takes masks
    wants_second: bool = False  # also return the second token of each choice whose spec asks for a margin


@noun
class PassResult:
    """Tokens that a pass chose, and the states that were asked for."""

    # [len(specs)] or BROKEN; UNCHOSEN for "logits", perhaps for "sampled", and behind the last of several steps.
    token_ids: NDArray[int64]
    logits: NDArray[floating] | None = None  # [num_logit_rows, vocab] raw; drafters may leave out "sampled" rows
    logit_idx: NDArray[int64] | None = None  # [num_wanted] row of `logits`, -1 where there is none
    taps: Mapping[int, NDArray[floating]] = field(default_factory=dict)  # as `Taps.states`
    margins: NDArray[floating] | None = None  # [len(specs)] logits ahead, or log-odds to be kept; NaN: not known
    second_ids: NDArray[int64] | None = None  # [len(specs)] second choices, or UNCHOSEN
    hidden: object = None  # [num_wanted, width] of a head: features of its guesses; the backend's own array
    pass_s: float | None = None  # seconds that the pass took by itself, where that was measured
    # Distinct experts, summed over layers: of the pass; mean of 1 token, of 2 neighbours, of 4. Empty: not known.
    touched: tuple[float, ...] = ()


class Pending(Protocol):
    """A pass that was launched."""

    def wait(self) -> PassResult:
        """Return the result, as often as asked. Raises what went wrong in the pass."""


# Executors --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities that an executor declares. Callers read them and never ask for its type."""

    multi_step: bool = False  # takes requests with `steps`
    asynchronous: bool = False  # a launched pass goes on beside the caller
    masks: bool = False  # chooses under masks
    branches: bool = False  # takes `Packed.copies`, and its stores of KV are `CopiesPages`
    late: bool = False  # drafts for rows whose newest tokens the host does not know; see `LateProgram`
    token_buckets: tuple[int, ...] = ()  # ascending; a pass costs as much as the next bucket; empty: no padding
    moves_pages: bool = False  # its stores of KV are `PageBytes`
    device: str = ""  # device and numerics that its times hold for; empty: the machine's processor


class Executor(Protocol):
    """Executor of one model or head. Holds weights; all other state is in its stores."""

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of this executor, on this machine."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory; a drafter's without its target's."""

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass that writes KV. Nothing it reads may change until `wait` returns."""


class Decoder(Executor, Protocol):
    """Executes a model."""

    name: str  # of its backend
    config: ModelConfig

    def describe(self) -> str:
        """Return backend, types and instruction set, in a few words for the user."""

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> KV:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""


class DraftExecutor(Executor, Protocol):
    """Executor of a drafter that shares its target's tables and writes some of its tokens."""

    weight_type: str  # type of its matrices

    def set_request_tokens(self, token_ids: NDArray[int64]) -> None:
        """Set the request tokens [n], written beside the draft vocabulary by the target's rows."""


class CutModelDecoder(DraftExecutor, Decoder, Protocol):
    """Executes a draft model that was cut from its target."""


class TapStore(Protocol):
    """Taps of committed tokens by slot of the target's page table, in half precision."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all states of one token."""

    def write(self, taps: Taps, counts: Sequence[int]) -> None:
        """Keep the taps of the first `counts[i]` tokens of row i of a target pass."""


class HeadRunner(DraftExecutor, Protocol):
    """Executes a draft head beside its target. Its requests have `features`.

    Only a head whose config says `request_tokens` gets request tokens.
    """

    config: HeadConfig

    def new_kv(self, num_pages: int) -> KV:
        """Return an empty store of `num_pages` pages for the head's layers."""

    def new_tap_store(self, num_pages: int) -> TapStore:
        """Return an empty store of `num_pages` pages for the taps that the head reads."""


class BlockHeadRunner(HeadRunner, Protocol):
    """Executes a block head.

    A pass makes the states of all guesses, which are then chosen one after another.
    """

    def correct(self, request: CorrectRequest) -> PassResult:
        """Choose the next guesses, corrected by those before them."""


@noun
class CorrectRequest:
    """One step of a block head, after its pass over all guesses.

    `PassResult.hidden` is the corrector's state behind these guesses.
    """

    hidden: object  # `PassResult.hidden` of the pass
    places: Sequence[int]  # [n] places of these guesses in `hidden`
    specs: Sequence[SamplingSpec]  # [n]
    before: Sequence[int]  # [n] tokens before them: the block's first one, then guesses
    state: FedBack  # [n] state of the corrector before these guesses


# Drafting before the host knows the outcome of the last step -----------------------------------------


class LateDraft(NamedTuple):
    """Drafts wanted for a row whose newest tokens the host does not know."""

    row: int
    depth: int  # most drafts
    bound: int  # upper bound of the committed tokens that the drafter has not read
    length: int  # upper bound of all committed tokens of the row
    stop: Stop | None = None


class LateProgram(Protocol):
    """Drafting on the target's device, over its rows. The host learns the drafts late."""

    def admit(self, row: int, entries: int, first_key: int) -> None:
        """Begin a row. Its first `entries` tokens count as read; those before `first_key` never are."""

    def catch_up(self, counts: Mapping[int, int]) -> None:
        """Read `counts[row]` further known tokens of rows."""

    def draft(self, drafts: Sequence[LateDraft]) -> None:
        """Read what rows gained, and draft for the target's next pass."""

    def close(self) -> None:
        """End the program: it takes no more taps."""


class LateOracle(LateProgram, Protocol):
    """A program that drafts recorded texts, spoilt to be kept as often as asked."""

    def record(self, row: int, prompt_len: int, answer: NDArray[int64], uniform: NDArray[float64]) -> None:
        """Set what an admitted row drafts behind its prompt.

        answer: [answer_len] token ids. uniform: [answer_len] a draft is right if this number is below its rate.
        """


class Pointers(NamedTuple):
    """Rule of drafts that follow the latest earlier place whose text ends like the row's."""

    min_match: int  # tokens that must be alike, at least
    max_match: int  # tokens that are compared, at most; of longer matches the latest is followed
    reach: float = inf  # most drafts per token of the match
    confident: bool = False  # True: the confidence behind n tokens that are alike is n / (n + 1)


class HintRule(NamedTuple):
    """Rule of hints to drafts that a device makes; gains are logits. See `draft/hints.py`."""

    min_match: int  # tokens that must be alike, at least
    max_match: int  # tokens that are compared
    gain: float = 0.0  # added logits for an e times longer match
    pair: float = 0.0  # as `RecycledGains`
    far_pair: float = 0.0
    token: float = 0.0
    reach: float = 1.0  # hinted tokens per token of the match, for guesses that do not know those before
    least_share: float = 0.0  # for these, a path goes on while this share of its places does

    @property
    def recycles(self) -> bool:
        """True if the target's choices behind refused drafts are kept as hints."""
        return self.pair != 0 or self.far_pair != 0 or self.token != 0


class LateHeadRunner(Protocol):
    """Runner of a head whose capabilities say `late`."""

    def late_program(self, rows: RowView, kv: KV, taps: TapStore, hints: HintRule) -> LateProgram:
        """Return a program for rows of the target."""


class LateDecoder(Protocol):
    """Decoder whose capabilities say `late`."""

    def serves(self, rows: RowView) -> bool:
        """Return True if it can draft for these rows before the host knows them."""

    def late_program(
        self, rows: RowView, kv: KV, num_layers: int | None, vocab_size: int, hints: HintRule, *, own_store: bool
    ) -> LateProgram:
        """Return a program that drafts with it for rows of a target.

        vocab_size: token ids to choose among. own_store: False where `kv` is the target's own.
        """

    def late_lookup(self, rows: RowView, pointers: Pointers) -> LateProgram:
        """Return a program that drafts what followed in rows' own texts. It runs no pass."""

    def late_oracle(
        self, rows: RowView, rates: NDArray[float64], max_answer: int, beside: LateProgram | None
    ) -> LateOracle:
        """Return a program that drafts recorded answers of at most `max_answer` tokens.

        rates: [depth] chance that a draft is kept if those before it are. beside: a program that runs only to
        cost its time; its drafts are replaced.
        """


# Makers of executors, see `registry.py` ----------------------------------------------------------


class LoadDecoder(Protocol):
    """Makes a backend's decoder from float weights."""

    def __call__(
        self,
        config: ModelConfig,
        weights: Mapping[str, NDArray[floating]],
        weight_type: str,
        kv_type: str,
        threads: int | None,
        device: Device | None = None,
    ) -> Decoder:
        """threads: on the device's cores; None: all. device: None for the backend's default."""


class LoadHeadRunner(Protocol):
    """Makes the runner of a head on its target's backend."""

    def __call__(self, head: Head, target: Decoder, device: Device | None, weight_type: str | None) -> HeadRunner:
        """Embed tokens as the target does, unless the head brings an embedding of its own.

        device: None for the target's. weight_type: of its matrices, None for the usual one. Raises `ConfigError`
        if the backend has no drafters of that type.
        """


class LoadCutModel(Protocol):
    """Makes the decoder of a draft model that was cut from its target."""

    def __call__(
        self, model: CutModel, target: Decoder, device: Device | None, weight_type: str | None
    ) -> CutModelDecoder:
        """See `LoadHeadRunner`."""


# Rows, as drafters see them ----------------------------------------------------------------------


class RowView(Protocol):
    """Rows as drafters see them: a host answers at once, a device may answer late.

    A view may lack the outcomes of the last `late_steps` steps. It is exact when a row is admitted.
    """

    @property
    def num_rows(self) -> int:
        """Number of rows, in use or not."""

    @property
    def max_len(self) -> int:
        """Tokens that a row has room for."""

    @property
    def late_steps(self) -> int:
        """Steps whose outcomes may be unknown. With any, drafts may stand at later positions."""

    def known_len(self, row: int) -> int:
        """Return a row's committed tokens, as far as they are known."""

    def computed_len(self, row: int) -> int:
        """Return how many of them have target KV."""

    def tokens(self, row: int) -> NDArray[int64]:
        """Return a row's committed tokens, [known_len] int64 on the host, read-only."""

    def texts(self, rows: Sequence[int]) -> list[kernels.TextIndex]:
        """Return indexes of rows' committed tokens, each made when it is first asked for."""

    def page_ids(self, row: int, start: int, end: int) -> list[int]:
        """Return entries `start` to `end` of a row's page table."""

    def pack(
        self,
        spans: Sequence[Span],
        wanted: Sequence[int],
        ahead: int = 0,
        *,
        first_keys: Sequence[int] | None = None,
        read_as: NDArray[int64] | None = None,
    ) -> Packed:
        """Pack spans `(row, start, num_known, guesses)`: committed tokens from `start` on, then guesses.

        `wanted[i]` counts the tokens at the end of span i whose hidden state is returned. The pages reach `ahead`
        tokens further than the spans. first_keys: see `Packed`. read_as: [vocab] the reader's id of each token id.
        """

    def row_specs(self, row: int, guesses: Sequence[int], *, margin: bool = False) -> list[SamplingSpec]:
        """Return the specs after a row's newest token and after each guess. [1 + num_guesses]"""

    def spec_after(self, row: int, guesses: Sequence[int]) -> SamplingSpec:
        """Return the spec of the token after a row's known tokens and some guesses."""

    def penalised(self, row: int) -> bool:
        """Return True if a row's specs depend on which tokens come before them."""

    def forced(self, row: int, most: int) -> list[int]:
        """Return up to `most` tokens that a row's grammar forces next."""
