"""The compiled kernels, see csrc/bind/. Arrays are C-contiguous; every argument is checked there."""

# fmt: off

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from numpy import float32, float64, floating, int32, int64, uint8, uint16, uint32
from numpy.typing import NDArray

_T = TypeVar("_T")
_Ids = NDArray[int64]
_F32 = NDArray[float32]
_F64 = NDArray[float64]
_Row = NDArray[floating[Any]]  # [vocab] float32 or float64
_Found = tuple[list[int], list[float], int]  # proposed token ids, their shares, length of the match
_Work = tuple[int, int, int, int]  # tokens, unscored, kv_tokens, pairs: see `Work` in control/cost.py

def isa() -> str: ...

# Sampling

def gumbel(k0: int, k1: int, id: int) -> float: ...  # noqa: A002
def choose(
    logits: _Row, temperature: float, top_k: int, top_p: float, min_p: float,
    edit_ids: _Ids, edit_scale: _F32, edit_add: _F32, k0: int, k1: int, mask: NDArray[int32],
) -> int: ...
def choose_with_margin(
    logits: _Row, temperature: float, top_k: int, top_p: float, min_p: float,
    edit_ids: _Ids, edit_scale: _F32, edit_add: _F32, k0: int, k1: int, mask: NDArray[int32],
) -> tuple[int, float]: ...
def filtered_ids(z: _Row, top_k: int, top_p: float, min_p: float) -> list[int]: ...
def logprobs(logits: _Row, token_id: int, num_top: int) -> tuple[float, list[int], list[float]]: ...

class SamplingSpecs:
    def __init__(
        self, kinds: NDArray[uint8], temperatures: _F64, filters: _F64, keys: NDArray[uint32],
        edit_offsets: _Ids, edit_ids: _Ids, edit_scale: _F32, edit_add: _F32,
    ) -> None: ...
    @property
    def num_logit_rows(self) -> int: ...
    def as_lists(self) -> list[list[float]]: ...

def read_specs(specs: list[Any], vocab: int) -> SamplingSpecs: ...  # reads `SamplingSpec` of core/nouns.py

# Weights

class ThreadPool:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class Matrix:
    @property
    def num_bytes(self) -> int: ...
    @property
    def writable(self) -> bool: ...  # False if it lies over a mapped file
    def row(self, index: int, to: _F32) -> None: ...
    def put_row(self, index: int, weights: _F32) -> None: ...

def pack(weights: _F32, dtype: str) -> Matrix: ...
def pack_int4(values: NDArray[uint8], scales: NDArray[uint16], minima: NDArray[uint16]) -> Matrix: ...
def pack_blocks(
    pool: ThreadPool, data: NDArray[uint8], stored: str, out: int, in_: int, dtype: str
) -> Matrix: ...
def pack_rows(pool: ThreadPool, source: Matrix, rows: NDArray[int64], dtype: str) -> Matrix: ...
def block_names() -> list[str]: ...  # names of blocks that `pack_blocks` can read
def kept_names() -> list[str]: ...  # names of blocks that are also types of weights
def buffers(matrix: Matrix) -> list[NDArray[uint8]]: ...  # read-only views
def buffer_bytes(dtype: str, out: int, in_: int) -> list[int]: ...
def matrix_over(data: NDArray[uint8], dtype: str, out: int, in_: int, starts: list[int]) -> Matrix: ...
def checksums(pool: ThreadPool, data: NDArray[uint8], piece: int) -> list[int]: ...
def multiply(pool: ThreadPool, matrix: Matrix, x: _F32, out: _F32) -> None: ...
def fuse(pool: ThreadPool, fc: Matrix, states: _F32, norms: _F32, eps: float, features: _F32) -> None: ...
def read_bandwidth(pool: ThreadPool, bytes: int) -> float: ...  # noqa: A002
def dot_peak(pool: ThreadPool) -> float: ...
def set_prefetching(rows: int, bytes: int, past: bool) -> None: ...  # noqa: A002
def time_products(pool: ThreadPool, matrices: list[Matrix], num_tokens: int, repeats: int) -> list[float]: ...

# Passes

class KVStore:
    def __init__(
        self, dtype: str, num_pages: int, heads: Sequence[tuple[int, int]], sliding: Sequence[int] = ()
    ) -> None: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def window_bytes_per_token(self) -> int: ...
    def drop_window(self, page: int) -> None: ...
    def drop_rest(self, page: int) -> None: ...
    def read_page(self, page: int, to: NDArray[uint8]) -> None: ...
    def write_page(self, page: int, data: NDArray[uint8]) -> None: ...
    def copy_page(self, source: int, target: int) -> None: ...

def checksum(data: NDArray[uint8]) -> int: ...

class PassInputs:
    def __init__(
        self, token_ids: _Ids, positions: _Ids, slots: _Ids, cu_len: _Ids,
        pages: _Ids, first_keys: _Ids, features: _F32, wanted: _Ids, copies: _Ids,
        branched: bool,
    ) -> None: ...

class Masks:  # masks of the wanted tokens; a pass reads them once they are open
    def __init__(self, words: NDArray[int32], masked: NDArray[uint8]) -> None: ...
    def open(self) -> None: ...

class PendingPass: ...  # keeps everything that the pass reads and writes

MOST_IN_PIECE: int  # most rows that are multiplied at once
RANK_MEMORY_BYTES: int

class RankMemory:  # memory of processes that share a decoder's layers
    def __init__(self, file: int, rank: int, size: int) -> None: ...
    @property
    def size(self) -> int: ...

class Decoder:
    def __init__(
        self,
        vocab: int,
        hidden: int,
        intermediate: int,
        num_heads: int,
        head_dim: int,
        heads: Sequence[tuple[int, int]],
        kv_layers: Sequence[int],
        norm_eps: float,
        pool: ThreadPool,
        embed: Matrix | None,  # None at ranks other than 0
        head: Matrix | None,
        final_norm: _F32,
        inverse_frequencies: _F32,
        magnitudes: _F32,
        layers: list[tuple[dict[str, Matrix], dict[str, _F32]]],
        windows: list[int],
        ropes: list[int],
        query_scale: float,
        embed_scale: float,
        activation: str,
        residual_scale: float = 1.0,
        score_cap: float = 0.0,
        logit_cap: float = 0.0,
        query_growth: float = 0.0,
        query_context: float = 1.0,
        norms_all: bool = False,
        norms_residual: bool = False,
        feeds_normed: bool = False,
        fusing_matrices: dict[str, Matrix] = ...,
        fusing_vectors: dict[str, _F32] = ...,
        token_ids: _Ids | None = None,
        experts_per_token: int = 0,
        norms_shares: bool = True,
        norms_values: bool = False,
        input_matrices: dict[str, Matrix] = ...,
        input_vectors: dict[str, _F32] = ...,
        routes_by_sigmoid: bool = False,
        share_scale: float = 1.0,
        reads_rows: bool = False,
        corrector_matrices: dict[str, Matrix] = ...,
        corrector_vectors: dict[str, _F32] = ...,
        ranks: RankMemory | None = None,
    ) -> None: ...
    @property
    def touched_experts(self) -> list[float]: ...
    @property
    def vocab(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def maps_ids(self) -> bool: ...
    @property
    def weight_bytes(self) -> int: ...
    def set_token_id(self, index: int, token_id: int) -> None: ...
    def forward(
        self, kv: KVStore, inputs: PassInputs, specs: SamplingSpecs, vocab: int, num_layers: int,
        tap_layers: list[int], taps: _F32, chosen: _Ids, logits: _F32, margins: _F32,
        masks: Masks | None = None,
    ) -> None: ...
    def begin(
        self, kv: KVStore, inputs: PassInputs, specs: SamplingSpecs, vocab: int, num_layers: int,
        tap_layers: list[int], taps: _F32, chosen: _Ids, logits: _F32, margins: _F32,
        masks: Masks | None = None,
    ) -> PendingPass: ...
    def finish(self) -> None: ...
    def follow(self, kv: KVStore, inputs: PassInputs, num_layers: int) -> None: ...
    def forward_steps(
        self, kv: KVStore, inputs: PassInputs, specs: SamplingSpecs, vocab: int, num_layers: int,
        depths: list[int], stops: _F64, hints: list[TokenHints | None], chosen: _Ids, margins: _F32,
        second_ids: _Ids,
    ) -> None: ...
    def store_context(self, kv: KVStore, inputs: PassInputs) -> None: ...
    def correct(
        self, states: _F32, previous_ids: _Ids, previous_state: _F32, specs: SamplingSpecs, vocab: int,
        chosen: _Ids, logits: _F32, margins: _F32, state: _F32,
    ) -> None: ...

# Rows and features

def pack_spans(
    token_ids: _Ids, pages: _Ids, spans: list[tuple[int, int, int, Sequence[int]]], wanted: list[int],
    num_tokens: int, block: _Ids, out_pages: _Ids,
) -> None: ...
def append_gains(
    token_ids: _Ids, length: _Ids, computed: _Ids, rows: tuple[Any, ...], verdicts: tuple[Any, ...]
) -> None: ...
def step_block(rows: tuple[Any, ...], num_drafts: list[int]) -> tuple[_Ids, int]: ...
def decode_rows(
    running: list[Any], group: int | None, ks: dict[int, int], free: int, take: Callable[[int], list[int]],
    row_type: type[_T],
) -> list[_T] | None: ...
def take_in(
    rows: tuple[Any, ...], proposed: tuple[Any, ...], drafts: tuple[Any, ...], verdicts: tuple[Any, ...],
    no_draft: object, states: dict[str, Any], responses: dict[str, Any], gains: list[Any],
) -> tuple[list[int], list[tuple[Any, int, int]], list[Any], int, int, list[int]]: ...
def make_outcomes(gains: list[_T], outcomes: list[Any], outcome_type: type[Any]) -> list[_T]: ...

class PageMemory:  # zeroed pages, whose memory is taken when they are written, or shortly before
    def __init__(self, num_pages: int) -> None: ...
    def halves(self, width: int) -> NDArray[uint16]: ...  # a region of its own, [tokens, width]
    def expect(self, first: int) -> None: ...  # pages from this one on are written soon

def write_halves(
    taps: list[_F32], starts: list[int], counts: list[int], slots: _Ids, store: NDArray[uint16]
) -> None: ...
def read_halves(store: NDArray[uint16], pages: _Ids, pieces: list[tuple[int, int, int]], out: _F32) -> None: ...
def accept_coupled(drafts: tuple[Any, ...], cu_len: list[int], chosen: _Ids) -> list[list[int]]: ...

# Lookup

class TextIndex:
    def __init__(self, capacity: int) -> None: ...
    def extend(self, token_ids: _Ids) -> None: ...
    def end_text(self) -> None: ...
    def propose(
        self, tail: _Ids, max_tokens: int, min_match: int, max_match: int,
        tokens_per_match: float, min_share: float,
    ) -> _Found: ...

def extend_rows(texts: Sequence[TextIndex], rows: Sequence[int], token_ids: _Ids, lengths: _Ids) -> None: ...
def propose_continuations(
    texts: Sequence[TextIndex], max_tokens: Sequence[int], min_match: int, max_match: int,
    tokens_per_match: float, min_share: float,
) -> list[_Found]: ...

class RecycledTokens:
    def __init__(self) -> None: ...
    def learn(self, drafted: list[int], chosen: _Ids, num_accepted: int, position: int) -> None: ...

class TokenHints:
    def __init__(self, text: TextIndex, tail: _Ids, gain: float, min_match: int, max_match: int) -> None: ...
    def add_recycled(self, recycled: RecycledTokens, gains: tuple[float, float, float], length: int) -> None: ...
    def next_hint(self, guesses: _Ids) -> tuple[int, float] | None: ...

# Control

class Estimates:
    def __init__(
        self, depth_logit: _F64, depth_var: _F64, usual_confidence: _F64, num_usual: _F64,
        row_logit: _F64, row_var: _F64, spread: _F64,
    ) -> None: ...

def survival_probs(
    estimates: Estimates, largest_logit: float, rows: _Ids, depth: int,
    confidence: _F64 | None, assume_usual: bool, optimism: float,
) -> _F64: ...
def observe_drafts(
    estimates: Sequence[Estimates], rates: _F64, rows: _Ids, num_verified: _Ids, num_accepted: _Ids,
    drafters: _Ids, indices: Sequence[int], confidence: _F64 | None,
) -> None: ...
def stop_drafts(
    honours_stops: Sequence[Estimates | None], half_s: _F64, half: int, tokens_per_s: float,
    rows: _Ids, max_drafts: _Ids, ks: _Ids, drafters: _Ids, left_alone: int,
) -> tuple[_Ids, _Ids, list[tuple[int, list[float], float, list[float]]]]: ...
def draft_arrays(
    rows: tuple[Any, ...], drafts: tuple[Any, ...], indices: dict[str, int], none: int
) -> tuple[_Ids, _F64]: ...
def confidence_array(drafts: list[Any]) -> _F64: ...
def outcome_arrays(
    rows: tuple[Any, ...], proposed: tuple[Any, ...], verified: tuple[Any, ...], verdicts: tuple[Any, ...],
    indices: dict[str, int], none: int,
) -> tuple[_Ids, _F64, _Work]: ...
def draft_bounds(running: list[Any]) -> _Ids: ...

class Costs:
    def __init__(
        self,
        sizes: tuple[_F64, _Ids, _Ids],
        passes: tuple[_Ids, _F64, _F64],
        curve: tuple[_F64, _F64, bool],
        prices: tuple[float, float, float],
        keys: _F64,
        drafting: tuple[_F64, _F64, _F64],
        drafters: tuple[_F64, _Ids],
        host: tuple[_F64, _Ids],
        drift: tuple[_F64, _Ids],
        rates: _F64,
    ) -> None: ...
    def drafting_of(self, ks: _Ids, drafters: _Ids) -> list[float]: ...
    def prices(self, base: _Work, lengths: _Ids, paying: int, num_drafters: int, depth: int) -> _F64: ...
    def choose(
        self, base: _Work, drafted: bool, survival: _F64, max_drafts: _Ids, lengths: _Ids, drafters: _Ids,
        plain_tokens: float, unpaid_s: float,
    ) -> tuple[_Ids, float, float, float]: ...
    def plan(
        self, estimates: Sequence[Estimates | None], largest_logit: float, previews: tuple[_F64 | None, ...],
        prices: _F64, tokens_per_s: float, rows: _Ids, lengths: _Ids, max_drafts: _Ids,
        assigned: _Ids, requested: int, prefill: _Work,
    ) -> tuple[_Ids, _Ids, float, float, float, float]: ...
    def trim(
        self, base: _Work, estimates: Sequence[Estimates | None], largest_logit: float,
        known_rows: _Ids, known_lengths: _Ids, rows: _Ids, drafters: _Ids, ks: _Ids, confidence: _F64,
        unpaid_s: float, left_alone: int,
    ) -> _Ids: ...
    def learn(
        self, known_rows: _Ids, known_lengths: _Ids, rows: _Ids, num_verified: _Ids, num_accepted: _Ids,
        num_drafted: _Ids, drafters: _Ids, prefill: _Work, seconds: tuple[float, float, float],
        settled: bool, observes_host: bool,
    ) -> tuple[float, float, float]: ...
