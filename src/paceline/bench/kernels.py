"""Kernels against the floor: what the machine can read and multiply at most, and how near to it we come."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.seam import Packed, PassRequest
from paceline.core.nouns import PAGE_TOKENS, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.model.config import layer_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.backend.native.decoder import NativeDecoder
    from paceline.backend.seam import KV
    from paceline.model.config import ModelConfig

COLD_BYTES = 200 << 20  # so many bytes of one shape are multiplied in turn that no cache holds them
MOST_COPIES = 1000
DOTS = {"int8": 1, "int4": 1}  # products of bytes for each weight and token; the others have no measured peak


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What all threads together can do at most."""

    bytes_per_s: float  # reading memory
    products_per_s: float  # of bytes, from registers


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix shape times some tokens."""

    name: str
    shape: tuple[int, int]
    num_tokens: int
    time_s: float  # of one product
    floor_s: float  # the larger of reading the weights and multiplying

    @property
    def ratio(self) -> float:
        """Time against the floor."""
        return self.time_s / self.floor_s


def measure_limits(team: kernels.Team) -> MachineLimits:
    """Measure the machine: some tenths of a second."""
    return MachineLimits(kernels.read_bandwidth(team, 1 << 28), kernels.dot_peak(team))


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the matrices of one layer and the head, by name, without those of the same shape as one before."""
    named = {name: shape for name, shape in layer_shapes(config).items() if len(shape) == 2}
    named["head"] = (config.vocab_size, config.hidden_size)
    first = {shape: name for name, shape in reversed(named.items())}
    return {name: (shape[0], shape[1]) for shape, name in reversed(first.items())}


def measure_products(
    team: kernels.Team,
    limits: MachineLimits,
    name: str,
    shape: tuple[int, int],
    weights: str,
    tokens: Sequence[int],
) -> Iterator[Product]:
    """Multiply cold copies of one shape by each number of tokens; medians of several rounds."""
    random = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    first = kernels.pack(random, weights)
    copies = min(MOST_COPIES, -(-COLD_BYTES // first.num_bytes))
    matrices = [first, *(kernels.pack(random, weights) for _ in range(copies - 1))]
    for num_tokens in tokens:
        times = kernels.time_products(team, matrices, num_tokens, 7 if num_tokens <= 16 else 3)
        reading = first.num_bytes / limits.bytes_per_s
        multiplying = DOTS.get(weights, 0) * shape[0] * shape[1] * num_tokens / limits.products_per_s
        yield Product(name, shape, num_tokens, median(times) / copies, max(reading, multiplying))


# Whole passes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A pass of `num_rows` rows with `num_tokens` tokens each, at a context."""

    num_rows: int
    num_tokens: int
    context: int

    def packed(self, vocab_size: int) -> Packed:
        """Return the pass, random tokens at pages of their own."""
        num_pages = -(-(self.context + self.num_tokens) // PAGE_TOKENS)
        pages = np.arange(self.num_rows * num_pages).reshape(self.num_rows, num_pages)
        places = np.arange(self.context, self.context + self.num_tokens)
        total = self.num_rows * self.num_tokens
        return Packed(
            token_ids=np.random.default_rng(0).integers(0, vocab_size, total),
            positions=np.tile(places, self.num_rows),
            slots=(pages[:, places // PAGE_TOKENS] * PAGE_TOKENS + places % PAGE_TOKENS).reshape(-1),
            cu_len=np.arange(0, total + 1, self.num_tokens),
            pages=pages,
            wanted=np.arange(total),
        )


CASES = (
    *(Case(1, n, 256) for n in (1, 2, 4, 8, 16, 32, 64)),
    *(Case(1, n, 2048) for n in (1, 8)),
    *(Case(n, 1, 256) for n in (16, 64)),
)


def num_pages(cases: Sequence[Case] = CASES) -> int:
    """Return how many KV pages the largest of some cases needs."""
    return max(c.num_rows * -(-(c.context + c.num_tokens) // PAGE_TOKENS) for c in cases)


def time_passes(decoder: NativeDecoder, kv: KV, cases: Sequence[Case], repeats: int) -> dict[Case, float]:
    """Return the median time of each pass, greedy, measured in turns so that a drifting machine drifts for all."""
    greedy = SamplingSpec("argmax", SamplingParams(temperature=0.0))
    passes = {case: case.packed(decoder.config.vocab_size) for case in cases}
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(repeats):
        for case, packed in passes.items():
            start = perf_counter()
            decoder.launch(PassRequest(packed, kv, [greedy] * len(packed.wanted))).wait()
            times[case].append(perf_counter() - start)
    return {case: median(t) for case, t in times.items()}


def all_matrices(config: ModelConfig, weights: str) -> list[kernels.Matrix]:
    """Return matrices of random weights, as many and as large as a pass multiplies."""
    shapes = [shape for shape in layer_shapes(config).values() if len(shape) == 2] * config.num_layers
    random = np.random.default_rng(0)
    return [
        kernels.pack(random.standard_normal(shape, dtype=np.float32), weights)
        for shape in (*shapes, (config.vocab_size, config.hidden_size))
    ]
