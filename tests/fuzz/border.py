"""Calls of the compiled kernels with good, slightly wrong and nonsensical arguments, made from bytes."""

from __future__ import annotations

import contextlib
import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from paceline import kernels
from paceline.control.acceptance import RATES
from paceline.control.cost import CostRates, Curve, DraftCost, MeasuredCost, TargetCost, draft_tables
from paceline.control.online_cost import OnlineCost
from paceline.core.nouns import NO_DRAFT, BatchRow, RowDraft, RowVerdict
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Outcome, Request
from paceline.engine.output import Response, StopChecker
from paceline.kernels import _ext
from paceline.model.detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.engine.request_state import RequestState

REFUSALS = (ValueError, TypeError, IndexError, OverflowError, MemoryError, RuntimeError, KeyError, AttributeError)
NUMBERS = [0, 1, -1, 2, 3, 7, 15, 16, 17, 31, 64, 255, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40]
NUMBERS += [(1 << 62) - 1, (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1, ((1 << 64) - 1) // 3, 1 << 64, -7]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), 5e-324]
DTYPES = ["i8", "i4", "f4", "f8", "u1", "u2", "u4", "f2", "?"]
TEXTS = ["", "f32", "f16", "i8", "i16", "int8", "int4", "int4_row", "bf16", "silu", "a" * 1000]
NOT_FUZZED = frozenset({"read_bandwidth", "dot_peak", "isa", "time_products", "ThreadPool"})  # which may take long
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 40, 32, 48, 4, 2, 8
RANK = 8  # of a block head's corrector


class Draw:
    """Choices that bytes stand for; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, bound: int) -> int:
        """Return a number from 0 to bound - 1."""
        at = self._at
        self._at += 2
        return int.from_bytes(self._data[at : at + 2], "little") % bound

    def one(self, choices: Any) -> Any:
        """Return one of some choices."""
        return choices[self.below(len(choices))]

    @property
    def spent(self) -> bool:
        """True if no bytes are left."""
        return self._at >= len(self._data)


def _row() -> BatchRow:
    return BatchRow(1, "1", 1, 2, samples=True, max_len=9, decodes=True)


def _gain() -> tuple[Response, list[int], RowVerdict]:
    """What an answer has gained and nobody was told."""
    pieces = {3: b"c", 4: "\u00e9".encode()}
    params = SamplingParams(max_tokens=8)
    checker = StopChecker(Request("1", (1,), params, seed=0), frozenset(), Detokenizer(pieces, strips_space=False))
    checker.take([3, 4])
    response = Response("1", cast("RequestState", None), checker, decode_passes=2, started=True)
    return response, [3, 4], RowVerdict([3, 4])


def _array(draw: Draw) -> Any:
    kind = draw.one(DTYPES)
    shape = [draw.one((0, 1, 2, 3, 8, 16, 32)) for _ in range(draw.below(4))]
    array = np.zeros(shape, kind)
    flat = array.reshape(-1)
    for _ in range(draw.below(5)):
        _spoil(flat, draw)
    match draw.below(8):
        case 0:
            return array.T
        case 1:
            array.flags.writeable = False
        case 2:
            return array[::2] if array.ndim else array
    return array


def _spoil(flat: Any, draw: Draw) -> None:
    """Write an odd number somewhere, if it is one of the array's type."""
    if flat.size:
        with contextlib.suppress(OverflowError, ValueError), np.errstate(all="ignore"):
            flat[draw.below(flat.size)] = draw.one(FLOATS if flat.dtype.kind == "f" else NUMBERS)


def anything(draw: Draw, depth: int = 0) -> Any:
    """Return an argument of any kind."""
    if depth < 3 and draw.below(2):
        some = [anything(draw, depth + 1) for _ in range(draw.below(5))]
        named = {draw.one(("fc", "attn_q", "before", "out", "attn_norm")): found for found in some[:1]}
        return draw.one([some, tuple(some), named, draw.one(_objects())])
    return draw.one([draw.one(NUMBERS), draw.one(FLOATS), draw.one(TEXTS), None, _array(draw), _array(draw)])


def altered(value: Any, draw: Draw) -> Any:
    """Return an argument a little changed, or another one."""
    if isinstance(value, np.ndarray) and draw.below(4):
        array = value.copy()
        match draw.below(4):
            case 0:
                array = array[: max(0, len(array) - 1)] if array.ndim else array
            case 1:
                array = np.concatenate([array, array[:1]]) if array.ndim else array
            case _:
                _spoil(array.reshape(-1), draw)
        return array
    if isinstance(value, list | tuple) and value and draw.below(4):
        items = list(value)
        at = draw.below(len(items))
        items[at] = altered(items[at], draw)
        return type(value)(items)
    if isinstance(value, dict) and value and draw.below(4):
        name = draw.one(sorted(value))
        return value | {name: altered(value[name], draw)}
    if isinstance(value, bool | int) and draw.below(4):
        return draw.one([*NUMBERS, value - 1, value + 1])
    if isinstance(value, float) and draw.below(4):
        return draw.one(FLOATS)
    return anything(draw)


# Good arguments --------------------------------------------------------------------------------------


def _floats(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _ids(*values: int) -> Any:
    return np.array(values, np.int64)


@cache
def _pool() -> Any:
    return kernels.ThreadPool(2)


@cache
def _matrix(out: int, size: int, kind: str = "int8") -> Any:
    return kernels.pack(_floats(out, size), kind)


@cache
def _objects() -> list[Any]:
    text = _ext.TextIndex(64)
    text.extend(_ids(1, 2, 3, 1, 2))
    text.end_text()
    return [
        _pool(),
        _matrix(HIDDEN, HIDDEN),
        _decoder(),
        _store(),
        _inputs(),
        _specs(),
        text,
        _ext.RecycledTokens(),
    ]


def _decoder_arguments() -> dict[str, Any]:
    q, kv = HEADS * DIM, KV_HEADS * DIM
    sides = {"attn_q": (q, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_o": (HIDDEN, q)}
    sides |= {"mlp_gate": (INNER, HIDDEN), "mlp_up": (INNER, HIDDEN), "mlp_down": (HIDDEN, INNER)}
    sides |= {"input_gate": (4, HIDDEN), "input_out": (HIDDEN, 4)}
    matrices = {name: _matrix(*side) for name, side in sides.items()}
    norms = {name: np.ones(HIDDEN, np.float32) for name in ("attn_norm", "mlp_norm", "input_post_norm")}
    fixed: dict[str, Any] = {"vocab": VOCAB, "hidden": HIDDEN, "intermediate": INNER, "num_heads": HEADS}
    return fixed | {
        "head_dim": DIM,
        "norm_eps": 1e-5,
        "pool": _pool(),
        "embed": _matrix(VOCAB, HIDDEN),
        "head": _matrix(VOCAB, HIDDEN),
        "final_norm": np.ones(HIDDEN, np.float32),
        "inverse_frequencies": np.ones((1, DIM // 2), np.float32),
        "magnitudes": np.ones((1, DIM // 2), np.float32),
        "layers": [(matrices, norms)] * 2,
        "windows": [0, 16],
        "ropes": [0, 0],
        "query_scale": 0.3,
        "embed_scale": 1.0,
        "activation": "silu",
        "residual_scale": 1.0,
        "score_cap": 0.0,
        "logit_cap": 0.0,
        "query_growth": 0.0,
        "query_context": 1.0,
        "norms_all": False,
        "norms_residual": False,
        "feeds_normed": False,
        "fusing_matrices": {},
        "fusing_vectors": {},
        "token_ids": None,
        "heads": [(KV_HEADS, DIM)] * 2,
        "kv_layers": [0, 1],
        "norms_values": True,
        "input_matrices": {"input_embed": _matrix(VOCAB, 8), "input_proj": _matrix(8, HIDDEN)},
        "input_vectors": {"input_norm": np.ones(4, np.float32)},
    }


@cache
def _decoder() -> Any:
    return kernels.Decoder(**_decoder_arguments())


@cache
def _renamed() -> Any:
    return kernels.Decoder(**_decoder_arguments() | {"token_ids": np.arange(VOCAB)})


def _block_arguments() -> dict[str, Any]:
    """Arguments of a block head with a corrector and a confidence."""
    vectors = {"mix_bias": _floats(3 * RANK), "confidence": _floats(HIDDEN + RANK), "confidence_bias": _floats(1)}
    joint = _matrix(3 * RANK, 2 * RANK + HIDDEN)
    return _decoder_arguments() | {
        "windows": [0, 0],
        "norms_values": False,
        "input_matrices": {},
        "reads_rows": True,
        "corrector_matrices": {"before": _matrix(VOCAB, RANK), "out": _matrix(VOCAB, RANK), "joint": joint},
        "corrector_vectors": vectors,
    }


@cache
def _block_decoder() -> Any:
    return kernels.Decoder(**_block_arguments())


@cache
def _context_inputs() -> Any:
    arguments = _inputs_arguments()
    arguments[6] = _floats(4, HIDDEN)
    return _ext.PassInputs(*arguments)


def _correct_arguments() -> list[Any]:
    state, none = _floats(2, RANK), np.empty((0, VOCAB), np.float32)
    margins = np.empty(2, np.float32)
    return [_floats(2, HIDDEN), _ids(1, 2), state, _specs(), VOCAB, _ids(0, 0), none, margins, state.copy()]


@cache
def _store() -> Any:
    return kernels.KVStore("f16", 4, [(KV_HEADS, DIM)] * 2)


def _inputs_arguments() -> list[Any]:
    pages, features = np.array([[0, 1], [2, 3]], np.int64), np.empty((0, HIDDEN), np.float32)
    arrays = [_ids(1, 2, 3, 4), _ids(0, 1, 16, 17), _ids(0, 1, 48, 49), _ids(0, 2, 4)]
    return [*arrays, pages, _ids(0, 0), features, _ids(1, 3), np.empty((0, 2), np.int64), False]


@cache
def _inputs() -> Any:
    return _ext.PassInputs(*_inputs_arguments())


def _specs_arguments() -> list[Any]:
    none = np.empty(0, np.float32)
    kinds, temperatures = np.array([0, 0], np.uint8), np.zeros(2)
    filters, keys = np.array([[0.0, 1.0, 0.0]] * 2), np.zeros((2, 2), np.uint32)
    return [kinds, temperatures, filters, keys, _ids(0, 0, 0), _ids(), none, none]


@cache
def _specs() -> Any:
    for filters in (_specs_arguments()[2], _specs_arguments()[2].reshape(-1)):
        for keys in (_specs_arguments()[3], _specs_arguments()[3].reshape(-1)):
            arguments = _specs_arguments()
            arguments[2:4] = filters, keys
            with contextlib.suppress(*REFUSALS):
                return _ext.SamplingSpecs(*arguments)
    return None


def _pass_arguments() -> list[Any]:
    taps, none = np.empty((1, 4, HIDDEN), np.float32), np.empty(0, np.float32)
    return [_store(), _inputs(), _specs(), VOCAB, 2, [0], taps, _ids(0, 0), np.empty((0, VOCAB), np.float32), none]


def _steps_arguments() -> list[Any]:
    stops, margins = np.empty((0, 3)), np.empty(2, np.float32)
    return [_store(), _inputs(), _specs(), VOCAB, 2, [1, 1], stops, [None, None], _ids(0, 0), margins, _ids(0, 0)]


def _estimates() -> Any:
    return _ext.Estimates(np.zeros(4), np.ones(4), np.ones(4), np.ones(4), np.zeros(2), np.ones(2), np.ones(3))


@cache
def _online() -> OnlineCost:
    curve = Curve.of([1, 4, 16], [1.0, 1.5, 4.0])
    target = TargetCost(curve, 0.01, 1e-4, 1e-4)
    return OnlineCost(MeasuredCost(target, (DraftCost((curve, curve, curve)),)))


def _costs_arguments() -> list[Any]:
    of = _online()
    target, tables, passes = of.measured.target, draft_tables(of.measured.drafters), of.passes
    curve = target.by_tokens
    return [
        (passes.log_error, passes.seen, passes.last),
        (passes.size_class, passes.measured_s, passes.seconds),
        (curve.counts, curve.seconds, curve.stepped),
        (target.pair_s, target.unscored_s, of.key_unit_s),
        of.key_price,
        (tables.added, tables.deepening, tables.seconds),
        (of.draft_factor, of.draft_steps),
        (of.host.row_s, of.host.seen),
        (np.zeros(1), of.num_passes),
        np.array(CostRates()),
    ]


def _good(name: str) -> list[Any] | dict[str, Any]:
    """Return arguments that a function takes, an empty list if none are known."""
    return _known().get(name, list)()


@cache
def _known() -> dict[str, Callable[[], Any]]:
    sampling = [_floats(VOCAB), 1.0, 5, 0.9, 0.05]
    edits = [_ids(3), np.ones(1, np.float32), np.ones(1, np.float32), 1, 2, np.empty(0, np.int32)]
    rows, block, pages = np.zeros((4, 32), np.int64), np.zeros(18, np.int64), np.zeros((2, 1), np.int64)
    return {
        "gumbel": lambda: [1, 2, 3],
        "choose": lambda: [*sampling, *edits],
        "choose_with_margin": lambda: [*sampling, *edits],
        "filtered_ids": lambda: [_floats(VOCAB), 5, 0.9, 0.05],
        "logprobs": lambda: [_floats(VOCAB), 3, 5],
        "SamplingSpecs": _specs_arguments,
        "pack": lambda: [_floats(8, HIDDEN), "int4"],
        "pack_int4": lambda: [
            np.zeros((4, 64), np.uint8),
            np.zeros((4, 2), np.uint16),
            np.zeros((4, 2), np.uint16),
        ],
        "pack_rows": lambda: [_pool(), _matrix(VOCAB, HIDDEN), _ids(3, 1), "int4_row"],
        "multiply": lambda: [_pool(), _matrix(VOCAB, HIDDEN), _floats(3, HIDDEN), _floats(3, VOCAB)],
        "fuse": lambda: [
            _pool(),
            _matrix(HIDDEN, 64),
            _floats(2, 64),
            np.ones((2, 32), np.float32),
            1e-5,
            _floats(2, HIDDEN),
        ],
        "time_products": lambda: [_pool(), [_matrix(HIDDEN, HIDDEN)], 2, 2],
        "ThreadPool": lambda: [2],
        "KVStore": lambda: ["i16", 4, [(KV_HEADS, DIM)] * 2],
        "PassInputs": _inputs_arguments,
        "Decoder": _decoder_arguments,
        "pack_spans": lambda: [
            rows,
            np.zeros((4, 2), np.int64),
            [(0, 0, 1, [5]), (2, 3, 2, [])],
            [1, 2],
            4,
            block,
            pages,
        ],
        "append_gains": lambda: [
            rows,
            np.zeros(4, np.int64),
            np.zeros(4, np.int64),
            (_row(),),
            (RowVerdict([3, 4]),),
        ],
        "step_block": lambda: [(_row(),), [2]],
        "take_in": lambda: [(_row(),), (NO_DRAFT,), (NO_DRAFT,), (RowVerdict([3, 4]),), NO_DRAFT, {}, {}, []],
        "make_outcomes": lambda: [[_gain()], [], Outcome],
        "decode_rows": lambda: [[], None, {0: 2}, 4, lambda count: [*range(count)], BatchRow],
        "PageMemory": lambda: [16],
        "write_halves": lambda: [[_floats(4, 8)], [1], [2], _ids(0, 1, 2, 3), np.zeros((16, 8), np.uint16)],
        "read_halves": lambda: [
            np.zeros((32, 8), np.uint16),
            np.array([[0, 1]], np.int64),
            [(0, 1, 3)],
            _floats(3, 8),
        ],
        "accept_coupled": lambda: [(RowDraft((1, 2)), RowDraft()), [0, 3, 4], _ids(1, 2, 3, 4)],
        "TextIndex": lambda: [64],
        "TokenHints": lambda: [_objects()[6], _ids(1, 2), 0.5, 2, 4],
        "extend_rows": lambda: [[_objects()[6]], [0], rows, _ids(3, 0, 0, 0)],
        "propose_continuations": lambda: [[_objects()[6]], [4], 2, 4, 1.0, 0.1],
        "Estimates": lambda: [
            np.zeros(4),
            np.ones(4),
            np.ones(4),
            np.ones(4),
            np.zeros(2),
            np.ones(2),
            np.ones(3),
        ],
        "survival_probs": lambda: [_estimates(), 5.0, _ids(0, 1), 3, np.full((2, 3), 0.5), False, 0.0],
        "observe_drafts": lambda: [
            [_estimates()],
            RATES,
            _ids(0, 1),
            _ids(2, 1),
            _ids(1, 1),
            _ids(0, 0),
            [0],
            None,
        ],
        "stop_drafts": lambda: [
            [_estimates()],
            np.ones((1, 8)),
            4,
            100.0,
            _ids(0, 1),
            _ids(3, 3),
            _ids(2, 2),
            _ids(0, 0),
            0,
        ],
        "Costs": _costs_arguments,
    }


_METHODS: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
    "forward": lambda: (_decoder().forward, _pass_arguments()),
    "forward_steps": lambda: (_decoder().forward_steps, _steps_arguments()),
    "store_context": lambda: (_block_decoder().store_context, [_store(), _context_inputs()]),
    "correct": lambda: (_block_decoder().correct, _correct_arguments()),
    "block_steps": lambda: (_block_decoder().forward_steps, _steps_arguments()),
    "begin": lambda: (_finished, _pass_arguments()),
    "set_token_id": lambda: (
        kernels.Decoder(**_decoder_arguments() | {"token_ids": np.arange(VOCAB)}).set_token_id,
        [0, 1],
    ),
    "row": lambda: (_matrix(8, HIDDEN).row, [1, _floats(HIDDEN)]),
    "put_row": lambda: (kernels.pack(_floats(8, HIDDEN), "f32").put_row, [1, _floats(HIDDEN)]),
    "extend": lambda: (_ext.TextIndex(64).extend, [_ids(1, 2, 3)]),
    "propose": lambda: (_objects()[6].propose, [_ids(1, 2), 4, 2, 4, 1.0, 0.1]),
    "learn": lambda: (_ext.RecycledTokens().learn, [[1, 2, 3], _ids(1, 2, 3), 1, 5]),
    "drafting_of": lambda: (_online().compiled.drafting_of, [_ids(1, 2), _ids(0, 0)]),
    "prices": lambda: (_online().compiled.prices, [(4, 0, 64, 64), _ids(5, 9), 1, 1, 3]),
    "choose_depth": lambda: (
        _online().compiled.choose,
        [(4, 0, 64, 64), True, np.full((2, 3), 0.5), _ids(3, 3), _ids(5, 9), _ids(0, 0), 2.0, 0.0],
    ),
    "halves": lambda: (_ext.PageMemory(4).halves, [8]),
    "expect": lambda: (_page_memory().expect, [1]),
    "next_hint": lambda: (_ext.TokenHints(*_good("TokenHints")).next_hint, [_ids(1)]),
}


def _page_memory() -> Any:
    """Return the memory of some pages."""
    memory = _ext.PageMemory(400)
    memory.halves(64)
    return memory


def _finished(*arguments: Any) -> None:
    """Begin a pass and wait for its end, with all that it reads kept alive by the pending pass."""
    pending = _decoder().begin(*arguments)
    _decoder().finish()
    del pending


@cache
def names() -> list[str]:
    """Names of everything that is called."""
    own = [name for name, value in vars(_ext).items() if callable(value) and name[0] != "_"]
    functions = [n for n in own if n not in NOT_FUZZED and not inspect.ismodule(getattr(_ext, n))]
    return sorted(functions) + sorted(_METHODS)


def with_good_arguments(name: str) -> tuple[Any, list[Any] | dict[str, Any]]:
    """Return a function with arguments that it takes."""
    return _METHODS[name]() if name in _METHODS else (getattr(_ext, name), _good(name))


def call_kernels(data: bytes) -> None:
    """Make calls until the bytes are used up."""
    draw = Draw(data)
    while not draw.spent:
        name = draw.one(names())
        function, good = with_good_arguments(name)
        keyed = good if isinstance(good, dict) else dict(enumerate(good))
        if not keyed or not draw.below(16):
            keyed = {index: anything(draw) for index in range(draw.below(12))}
        for _ in range(draw.below(4)):
            if keyed:
                key = draw.one(list(keyed))
                keyed[key] = altered(keyed[key], draw)
        with contextlib.suppress(*REFUSALS):
            if isinstance(good, dict) and all(isinstance(key, str) for key in keyed):
                function(**keyed)
            else:
                function(*keyed.values())
