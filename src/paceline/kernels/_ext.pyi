"""The compiled kernels, see csrc/binding.cpp. Arrays are C-contiguous; every argument is checked there."""

from collections.abc import Sequence
from typing import Any

from numpy import float32, float64, floating, int64, uint8, uint16, uint32
from numpy.typing import NDArray

def isa() -> str: ...
def gumbel(k0: int, k1: int, id: int) -> float: ...  # noqa: A002
def choose(
    logits: NDArray[floating[Any]],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    edit_ids: NDArray[int64],
    edit_scale: NDArray[float32],
    edit_add: NDArray[float32],
    k0: int,
    k1: int,
) -> int: ...
def choose_ahead(
    logits: NDArray[floating[Any]],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    edit_ids: NDArray[int64],
    edit_scale: NDArray[float32],
    edit_add: NDArray[float32],
    k0: int,
    k1: int,
) -> tuple[int, float]: ...
def keep(z: NDArray[floating[Any]], top_k: int, top_p: float, min_p: float) -> list[int]: ...
def logprobs(
    logits: NDArray[floating[Any]], token_id: int, num_top: int
) -> tuple[float, list[int], list[float]]: ...

class Team:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class Matrix:
    @property
    def num_bytes(self) -> int: ...
    def row(self, index: int, to: NDArray[float32]) -> None: ...
    def put_row(self, index: int, weights: NDArray[float32]) -> None: ...

def pack(weights: NDArray[float32], dtype: str) -> Matrix: ...
def pack_int4(values: NDArray[uint8], scales: NDArray[uint16], minima: NDArray[uint16]) -> Matrix: ...
def multiply(team: Team, matrix: Matrix, x: NDArray[float32], out: NDArray[float32]) -> None: ...
def fuse(
    team: Team,
    fc: Matrix,
    states: NDArray[float32],
    norms: NDArray[float32],
    eps: float,
    features: NDArray[float32],
) -> None: ...
def read_bandwidth(team: Team, bytes: int) -> float: ...  # noqa: A002
def dot_peak(team: Team) -> float: ...
def time_products(team: Team, matrices: list[Matrix], num_tokens: int, repeats: int) -> list[float]: ...

class KVStore:
    def __init__(
        self,
        dtype: str,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...

class Chooses:
    def __init__(
        self,
        kinds: NDArray[uint8],
        temperatures: NDArray[float64],
        filters: NDArray[float64],
        keys: NDArray[uint32],
        edit_offsets: NDArray[int64],
        edit_ids: NDArray[int64],
        edit_scale: NDArray[float32],
        edit_add: NDArray[float32],
    ) -> None: ...
    @property
    def num_logit_rows(self) -> int: ...
    def told(self) -> list[list[float]]: ...

def read_chooses(specs: list[Any], vocab: int) -> Chooses: ...  # of core/nouns.py
def pack_spans(
    token_ids: NDArray[int64],
    pages: NDArray[int64],
    spans: list[tuple[int, int, int, Sequence[int]]],
    wanted: list[int],
    num_tokens: int,
    block: NDArray[int64],
    out_pages: NDArray[int64],
) -> None: ...
def append_tokens(
    token_ids: NDArray[int64],
    length: NDArray[int64],
    computed: NDArray[int64],
    gained: list[tuple[int, int, Sequence[int]]],
) -> None: ...

class Read:
    def __init__(
        self,
        token_ids: NDArray[int64],
        positions: NDArray[int64],
        slots: NDArray[int64],
        cu_len: NDArray[int64],
        pages: NDArray[int64],
        first_keys: NDArray[int64],
        features: NDArray[float32],
        wanted: NDArray[int64],
    ) -> None: ...

class Begun: ...  # a pass, with all that it reads and writes

class Decoder:
    def __init__(
        self,
        vocab: int,
        hidden: int,
        intermediate: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm_eps: float,
        team: Team,
        embed: Matrix,
        head: Matrix,
        final_norm: NDArray[float32],
        inverse_frequencies: NDArray[float32],
        layers: list[tuple[dict[str, Matrix], dict[str, NDArray[float32]]]],
        windows: list[int],
        ropes: list[int],
        query_scale: float,
        embed_scale: float,
        activation: str,
        norms_residual: bool = False,
        feeds_normed: bool = False,
        fusing_matrices: dict[str, Matrix] = ...,
        fusing_vectors: dict[str, NDArray[float32]] = ...,
        relay_matrices: dict[str, Matrix] = ...,
        relay_vectors: dict[str, NDArray[float32]] = ...,
        token_ids: NDArray[int64] | None = None,
    ) -> None: ...
    @property
    def relay_size(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def maps_ids(self) -> bool: ...
    def set_token_id(self, index: int, token_id: int) -> None: ...
    @property
    def weight_bytes(self) -> int: ...
    def forward(
        self,
        kv: KVStore,
        read: Read,
        specs: Chooses,
        vocab: int,
        num_layers: int,
        tap_layers: list[int],
        taps: NDArray[float32],
        chosen: NDArray[int64],
        logits: NDArray[float32],
        margins: NDArray[float32],
    ) -> None: ...
    def begin(
        self,
        kv: KVStore,
        read: Read,
        specs: Chooses,
        vocab: int,
        num_layers: int,
        tap_layers: list[int],
        taps: NDArray[float32],
        chosen: NDArray[int64],
        logits: NDArray[float32],
        margins: NDArray[float32],
    ) -> Begun: ...
    def finish(self) -> None: ...
    def forward_in_turn(
        self,
        kv: KVStore,
        read: Read,
        specs: Chooses,
        vocab: int,
        num_layers: int,
        depths: list[int],
        stops: NDArray[float64],
        pointers: list[Pointer | None],
        chosen: NDArray[int64],
        margins: NDArray[float32],
    ) -> None: ...
    def relay(
        self,
        first: NDArray[float32],
        normed: NDArray[float32],
        token_ids: NDArray[int64],
        before: NDArray[float32],
        specs: Chooses,
        vocab: int,
        chosen: NDArray[int64],
        logits: NDArray[float32],
        margins: NDArray[float32],
        told: NDArray[float32],
    ) -> None: ...

class TextIndex:
    def __init__(self, capacity: int) -> None: ...
    def extend(self, token_ids: NDArray[int64]) -> None: ...
    def end_text(self) -> None: ...
    def propose(
        self,
        tail: NDArray[int64],
        most: int,
        min_match: int,
        max_match: int,
        reach: float,
        least_share: float,
    ) -> tuple[list[int], list[float], int]: ...

class Recycled:
    def __init__(self) -> None: ...
    def learn(self, drafted: list[int], chosen: NDArray[int64], num_kept: int, place: int) -> None: ...

class Pointer:
    def __init__(
        self, text: TextIndex, tail: NDArray[int64], gain: float, min_match: int, max_match: int
    ) -> None: ...
    def recycle(self, recycled: Recycled, gains: tuple[float, float, float], length: int) -> None: ...
    def look(self, guesses: NDArray[int64]) -> tuple[int, float] | None: ...

class Estimates:
    def __init__(
        self,
        habit: NDArray[float64],
        habit_var: NDArray[float64],
        usual: NDArray[float64],
        num_usual: NDArray[float64],
        ease: NDArray[float64],
        ease_var: NDArray[float64],
        spread: NDArray[float64],
    ) -> None: ...

PassWork = tuple[int, int, int, int]  # tokens, unscored, kv_tokens, pairs: see `Work` in control/cost.py

class Costs:
    def __init__(
        self,
        sizes: tuple[NDArray[float64], NDArray[int64], NDArray[int64]],
        passes: tuple[NDArray[int64], NDArray[float64], NDArray[float64]],
        curve: tuple[NDArray[float64], NDArray[float64], bool],
        prices: tuple[float, float, float],
        keys: NDArray[float64],
        drafting: tuple[NDArray[float64], NDArray[float64], NDArray[float64]],
        drafters: tuple[NDArray[float64], NDArray[int64]],
        host: tuple[NDArray[float64], NDArray[int64]],
        hour: tuple[NDArray[float64], NDArray[int64]],
        rates: NDArray[float64],
    ) -> None: ...
    def drafting_of(self, ks: NDArray[int64], drafters: NDArray[int64]) -> list[float]: ...
    def prices(
        self, base: PassWork, lengths: NDArray[int64], paying: int, num_drafters: int, depth: int
    ) -> NDArray[float64]: ...
    def choose(
        self,
        base: PassWork,
        drafted: bool,
        alive: NDArray[float64],
        most: NDArray[int64],
        lengths: NDArray[int64],
        drafters: NDArray[int64],
        plain_tokens: float,
        unpaid_s: float,
    ) -> tuple[NDArray[int64], float, float, float]: ...
    def plan(
        self,
        estimates: Sequence[Estimates | None],
        largest_logit: float,
        offers: tuple[NDArray[float64] | None, ...],
        prices: NDArray[float64],
        per_s: float,
        rows: NDArray[int64],
        lengths: NDArray[int64],
        most: NDArray[int64],
        own: NDArray[int64],
        asked: int,
        prefill: PassWork,
    ) -> tuple[NDArray[int64], NDArray[int64], float, float, float, float]: ...
    def trim(
        self,
        base: PassWork,
        estimates: Sequence[Estimates | None],
        largest_logit: float,
        known_rows: NDArray[int64],
        known_lengths: NDArray[int64],
        rows: NDArray[int64],
        drafters: NDArray[int64],
        ks: NDArray[int64],
        confidence: NDArray[float64],
        unpaid_s: float,
        left_alone: int,
    ) -> NDArray[int64]: ...
    def learn(
        self,
        known_rows: NDArray[int64],
        known_lengths: NDArray[int64],
        rows: NDArray[int64],
        num_verified: NDArray[int64],
        num_accepted: NDArray[int64],
        num_drafted: NDArray[int64],
        drafters: NDArray[int64],
        prefill: PassWork,
        seconds: tuple[float, float, float],
        settled: bool,
        tells_of_host: bool,
    ) -> tuple[float, float, float]: ...

def alive_of(
    estimates: Estimates,
    largest_logit: float,
    rows: NDArray[int64],
    depth: int,
    confidence: NDArray[float64] | None,
    usual: bool,
    optimism: float,
) -> NDArray[float64]: ...
def observe_drafts(
    estimates: Sequence[Estimates],
    rates: NDArray[float64],
    rows: NDArray[int64],
    num_verified: NDArray[int64],
    num_accepted: NDArray[int64],
    drafters: NDArray[int64],
    own: Sequence[int],
    confidence: NDArray[float64] | None,
) -> None: ...
def stop_drafts(
    minding: Sequence[Estimates | None],
    of_half: NDArray[float64],
    half: int,
    per_s: float,
    rows: NDArray[int64],
    most: NDArray[int64],
    ks: NDArray[int64],
    drafters: NDArray[int64],
    left_alone: int,
) -> tuple[NDArray[int64], NDArray[int64], list[tuple[int, list[float], float, list[float]]]]: ...
def drafted_of(
    rows: tuple[Any, ...], drafts: tuple[Any, ...], indices: dict[str, int], none: int
) -> tuple[NDArray[int64], NDArray[float64]]: ...
def confidence_of(drafts: list[Any]) -> NDArray[float64]: ...
def outcomes_of(
    rows: tuple[Any, ...],
    proposed: tuple[Any, ...],
    verified: tuple[Any, ...],
    verdicts: tuple[Any, ...],
    indices: dict[str, int],
    none: int,
) -> tuple[NDArray[int64], NDArray[float64], PassWork]: ...
def bounds_of(running: list[Any]) -> NDArray[int64]: ...
def extend_rows(
    texts: Sequence[TextIndex], rows: Sequence[int], token_ids: NDArray[int64], lengths: NDArray[int64]
) -> None: ...
def go_on(
    texts: Sequence[TextIndex],
    most: Sequence[int],
    min_match: int,
    max_match: int,
    reach: float,
    least_share: float,
) -> list[tuple[list[int], list[float], int]]: ...
def kept_while_chosen(drafts: tuple[Any, ...], cu_len: list[int], chosen: NDArray[int64]) -> list[list[int]]: ...
def zero_halves(rows: int, width: int) -> NDArray[uint16]: ...
def write_halves(
    taps: list[NDArray[float32]],
    starts: list[int],
    counts: list[int],
    slots: NDArray[int64],
    store: NDArray[uint16],
) -> None: ...
def read_halves(
    store: NDArray[uint16],
    pages: NDArray[int64],
    pieces: list[tuple[int, int, int]],
    out: NDArray[float32],
) -> None: ...
