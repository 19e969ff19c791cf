"""The `native` backend: C++ CPU kernels (csrc/), one call per pass, batch-invariant bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline import kernels
from paceline.backend.sampling import logit_rows
from paceline.backend.seam import Capabilities, PassResult
from paceline.backend.target import Deferred

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import float32, float64, floating
    from numpy.typing import NDArray

    from paceline.backend.seam import Packed, PassRequest, Pending, StepLimit
    from paceline.model.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class SharedTables:
    """Tables of a target that its drafters read, too."""

    embed: kernels.Matrix  # [vocab, hidden]
    head: kernels.Matrix  # [vocab, hidden], `embed` itself where they are tied
    final_norm: NDArray[float32]  # [hidden]


class NativeDecoder:
    """A Llama-family decoder over packed weights: a token's numbers depend on its own row only."""

    name = "native"
    num_ranks = 1

    def __init__(
        self,
        config: ModelConfig,
        team: kernels.ThreadPool,
        compiled: kernels.Decoder,
        tables: SharedTables,
        weight_type: str,
        kv_type: str,
        compile_for: Callable[..., kernels.Decoder] | None = None,
    ) -> None:
        """See `load.pack_decoder`. compile_for: compiles its parts for another `output`, see `narrowed`."""
        self.config = config
        self.team = team
        self.compiled, self.tables, self.compile_for = compiled, tables, compile_for
        self.weight_type, self.kv_type = weight_type, kv_type
        self.alone = Lock()  # compiled layers have room for one pass, and a drafter may use the target's
        self._begun: kernels.PendingPass | None = None  # the last pass begun; it keeps what it reads and writes

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self.name}, {self.weight_type} weights, {self.kv_type} KV, {kernels.isa()}"

    def adopt(self, fresh: NativeDecoder) -> None:
        """Compute with the weights of another decoder of the same shape, between passes."""
        with self.alone:
            self.compiled.finish()
            self._begun = None
            self.compiled, self.tables, self.compile_for = fresh.compiled, fresh.tables, fresh.compile_for

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: overlapping passes if the team has further threads, which `wait` joins."""
        asynchronous = self.team.num_threads > 1
        alone = self.num_ranks == 1  # other ranks are not told of `Packed.copies`
        return Capabilities(
            multi_step=True, masks=True, asynchronous=asynchronous, moves_pages=True, branches=alone
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return self.compiled.weight_bytes

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> kernels.KVStore:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        c = self.config
        return kernels.KVStore(self.kv_type, num_pages, c.kv_heads(num_layers), c.sliding_kv(num_layers))

    def launch(self, request: PassRequest) -> Pending:
        """Begin a one-step pass on the team's other threads; other passes run in `wait`."""
        if request.steps or self.team.num_threads == 1:
            return Deferred(partial(self._run, request))
        prepared = prepare(self.compiled, request, self._num_choices(request), self._num_layers(request))
        with self.alone:
            self.compiled.finish()  # a pass begun before; dropped unfinished it would wait with Python's lock held
            self._begun = None
            self._lead(request)
            self._begun = self.compiled.begin(*prepared.arguments)
        return Deferred(partial(self._finish, request, prepared.result))

    def _finish(self, request: PassRequest, result: PassResult) -> PassResult:
        with self.alone:
            self.compiled.finish()
            self._begun = None  # otherwise its KV would live as long as the weights
            touched = self._touched()
        return self._padded(request, replace(result, touched=touched) if touched else result)

    def _run(self, request: PassRequest) -> PassResult:
        vocab, num_layers = self._num_choices(request), self._num_layers(request)
        if request.steps:
            with self.alone:
                self._lead(request)
                return self._padded(request, run_steps(self.compiled, request, vocab, num_layers))
        prepared = prepare(self.compiled, request, vocab, num_layers)  # may raise: other ranks are told after it
        with self.alone:
            self._lead(request)
            self.compiled.forward(*prepared.arguments)
            touched = self._touched()
        result = replace(prepared.result, touched=touched) if touched else prepared.result
        return self._padded(request, result)

    def _lead(self, request: PassRequest) -> None:
        """Tell other ranks, if any, of a pass that now runs."""

    def _touched(self) -> tuple[float, ...]:
        """Return the experts that the last pass touched."""
        return () if self.config.experts is None else tuple(self.compiled.touched_experts)

    def _padded(self, request: PassRequest, result: PassResult) -> PassResult:
        """Add logits for the padding rows of a target's larger vocabulary."""
        missing = (request.vocab_size or 0) - self.config.vocab_size
        if missing <= 0 or result.logits is None:
            return result
        padded = np.pad(result.logits, ((0, 0), (0, missing)), constant_values=-np.inf)
        return replace(result, logits=padded)

    def _num_choices(self, request: PassRequest) -> int:
        return min(request.vocab_size or self.config.vocab_size, self.config.vocab_size)

    def _num_layers(self, request: PassRequest) -> int:
        return request.num_layers or self.config.num_layers


# Passes of compiled layers -----------------------------------------------------------------------


class Prepared(NamedTuple):
    """A pass as the kernels take it, and its result once it has run."""

    arguments: tuple[Any, ...]  # of `kernels.Decoder.forward`
    result: PassResult


def prepare(
    compiled: kernels.Decoder,
    request: PassRequest,
    vocab: int,
    num_layers: int,
    features: NDArray[float32] | None = None,
    taps: Sequence[int] | None = None,
) -> Prepared:
    """Put together a pass of compiled layers, and room for its result.

    It chooses among the first `vocab` tokens of the head. features: [num_tokens, hidden] float32 where the layers
    read them. taps: in place of the request's.
    """
    packed, specs = request.packed, request.specs
    assert isinstance(request.kv, kernels.KVStore)
    taps = request.taps if taps is None else taps
    read_specs = kernels.read_specs(list(specs), compiled.vocab if compiled.maps_ids else vocab)
    num_logit_rows = read_specs.num_logit_rows
    logits = np.empty((num_logit_rows, vocab), np.float32) if num_logit_rows else _NO_NUMBERS
    token_ids = np.empty(len(packed.wanted), np.int64)
    states = np.empty((len(taps), len(packed.token_ids), compiled.hidden), np.float32)
    margins = np.empty(len(specs), np.float32) if any(s.margin for s in specs) else _NO_NUMBERS
    read = read_inputs(compiled, packed, features)
    outputs = states, token_ids, logits, margins
    return Prepared(
        (request.kv, read, read_specs, vocab, num_layers, list(taps), *outputs, request.masks),
        PassResult(
            token_ids,
            logits=logits if num_logit_rows else None,
            logit_idx=logit_rows(specs) if num_logit_rows else None,
            taps={tap: states[index] for index, tap in enumerate(taps)},
            margins=margins if margins.size else None,
        ),
    )


def run_pass(
    compiled: kernels.Decoder,
    request: PassRequest,
    vocab: int,
    num_layers: int,
    features: NDArray[float32] | None = None,
    taps: Sequence[int] | None = None,
) -> PassResult:
    """Run a pass of compiled layers, see `prepare`."""
    prepared = prepare(compiled, request, vocab, num_layers, features, taps)
    compiled.forward(*prepared.arguments)
    return prepared.result


def run_steps(
    compiled: kernels.Decoder,
    request: PassRequest,
    vocab: int,
    num_layers: int,
    features: NDArray[float32] | None = None,
) -> PassResult:
    """Run several steps in one call; a token's output is the next token's feature."""
    specs, steps = request.specs, request.steps
    assert isinstance(request.kv, kernels.KVStore)
    token_ids, margins = np.empty(len(specs), np.int64), np.empty(len(specs), np.float32)
    second_ids = np.empty(len(specs) if request.wants_second else 0, np.int64)
    compiled.forward_steps(
        request.kv,
        read_inputs(compiled, request.packed, features),
        kernels.read_specs(list(specs), compiled.vocab if compiled.maps_ids else vocab),
        vocab=vocab,
        num_layers=num_layers,
        depths=[limit.depth for limit in steps],
        stops=_stop_table(steps),
        hints=[limit.pointer for limit in steps],
        chosen=token_ids,
        margins=margins,
        second_ids=second_ids,
    )
    return PassResult(token_ids, margins=margins, second_ids=second_ids if request.wants_second else None)


def _stop_table(steps: Sequence[StepLimit]) -> NDArray[float64]:
    """Return rows' stop rules: odds, sureness, least; 0 without a rule. [sum of depths, 3]"""
    if not any(limit.stop for limit in steps):
        return np.empty((0, 3))
    odds, sureness, least = list[float](), list[float](), list[float]()
    for depth, stop, _ in steps:
        odds += stop.odds[:depth] if stop else [0.0] * depth
        sureness += [stop.sureness if stop else 0.0] * depth
        least += stop.least[:depth] if stop else [0.0] * depth
    return np.array([odds, sureness, least]).T.copy()


_NO_COPIES, _NO_NUMBERS = np.empty((0, 2), np.int64), np.empty(0, np.float32)


def read_inputs(
    compiled: kernels.Decoder, packed: Packed, features: NDArray[float32] | None
) -> kernels.PassInputs:
    """Return what a pass reads. features: [num_tokens, hidden] or none."""
    return kernels.PassInputs(
        packed.token_ids,
        packed.positions,
        packed.slots,
        packed.cu_len,
        np.ascontiguousarray(packed.pages),
        np.zeros(len(packed.pages), np.int64) if packed.first_keys is None else packed.first_keys,
        np.empty((0, compiled.hidden), np.float32) if features is None else features,
        packed.wanted,
        _NO_COPIES if packed.copies is None else packed.copies,
        branched=packed.copies is not None,
    )


def as_float32(tensor: NDArray[floating]) -> NDArray[float32]:
    """Return an array as the kernels read it."""
    return np.ascontiguousarray(tensor, np.float32)
