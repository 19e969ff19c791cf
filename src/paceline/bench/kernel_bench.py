"""`paceline bench kernels`: measure the native kernels against the machine's own limits.

The floor of a matrix product is the larger of two times: reading its weights, and multiplying them.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.native.decoder import NativeDecoder
from paceline.backend.native.load import pack_decoder
from paceline.backend.native.prefetching import tune
from paceline.backend.seam import Packed, PassRequest
from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.system import usable_cores
from paceline.engine.assembly.config import MAX_THREADS
from paceline.model.config import layer_shapes
from paceline.model.weights import load_model
from paceline.serve.terminal.display import progress, say, table

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator, Sequence

    from paceline.backend.seam import KV
    from paceline.model.config import ModelConfig

TOKENS = (1, 2, 4, 8, 16, 32, 64)  # numbers of tokens that matrices are multiplied by
WEIGHT_TYPES = ("int8", "int4", "bf16", "f32")
KV_TYPES = ("i16", "i8", "f16", "f32")
COLD_BYTES = 200 << 20  # copies of a matrix fill this much memory, so that no cache holds the next one
MAX_COPIES = 1000  # of a matrix, however small it is
BYTE_PRODUCTS = {"int8": 1, "int4": 1}  # byte products per weight and token; other types have no measured peak


# The command -------------------------------------------------------------------------------------


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", default="default", metavar="default|PATH|ID", help="whose shapes are measured")
    parser.add_argument("--weights", default="int8", metavar="TYPE", help=f"one of {', '.join(WEIGHT_TYPES)}")
    parser.add_argument("--kv", default="i16", metavar="TYPE", help=f"one of {', '.join(KV_TYPES)}")
    parser.add_argument("--threads", type=int, metavar="N", help="threads (default: all cores)")
    parser.add_argument("--repeat", type=int, default=15, metavar="R", help="rounds of whole passes")


def run(args: Namespace) -> int:
    """Measure and print three tables."""
    if args.weights not in WEIGHT_TYPES or args.kv not in KV_TYPES:
        raise ConfigError(f"--weights is one of {', '.join(WEIGHT_TYPES)}, --kv one of {', '.join(KV_TYPES)}")
    threads = len(usable_cores()) if args.threads is None else args.threads
    if not 1 <= threads <= MAX_THREADS or not 1 <= args.repeat <= 10_000:
        raise ConfigError(f"--threads must be between 1 and {MAX_THREADS}, --repeat between 1 and 10000")
    model, team = load_model(args.model), kernels.ThreadPool(threads)
    limits = MachineLimits(kernels.read_bandwidth(team, 1 << 28), kernels.dot_peak(team))
    say(
        f"{kernels.isa()}, {threads} threads: reads {limits.bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies {limits.products_per_s / 1e9:.0f} billion bytes/s"
    )
    decoder = pack_decoder(model.config, model.weights, team, args.weights, args.kv)
    say(f"few tokens prefetch weights {tune(decoder)}")
    _print_products(team, limits, model.config, args.weights)
    _print_passes(args.repeat, decoder, args.weights, limits)
    return 0


def _print_products(team: kernels.ThreadPool, limits: MachineLimits, config: ModelConfig, weights: str) -> None:
    shapes, rows = matrix_shapes(config), list[list[str]]()
    with progress("matrices") as update:
        for done, (name, shape) in enumerate(shapes.items(), start=1):
            products = list(measure_products(team, limits, shape, weights, TOKENS))
            cells = [f"{p.time_s * 1e6:.0f} ({p.ratio:.2f}x)" for p in products]
            rows.append([name, "{} x {}".format(*shape), *cells])
            update(done, len(shapes))
    title = f"{weights}: µs of a product, and times its floor"
    table(title, ["matrix", "shape", *(f"{n} tok" for n in TOKENS)], rows, num_left=2)


def _print_passes(rounds: int, decoder: NativeDecoder, weights: str, limits: MachineLimits) -> None:
    num_pages = max(s.num_rows * -(-(s.context + s.num_tokens) // PAGE_TOKENS) for s in PASS_SHAPES)
    kv, team = decoder.new_kv(num_pages), decoder.team
    matrices = all_matrices(decoder.config, weights)
    times: dict[PassShape, list[float]] = {shape: [] for shape in PASS_SHAPES}
    products: dict[int, list[float]] = {1: [], 64: []}
    with progress("passes") as update:
        for done in range(1, rounds + 1):
            for shape, time_s in time_passes(decoder, kv, PASS_SHAPES, 1).items():
                times[shape].append(time_s)
            for num_tokens, measured in products.items():
                measured.extend(kernels.time_products(team, matrices, num_tokens, 1))
            update(done, rounds)
    medians = {shape: median(measured) for shape, measured in times.items()}
    rows = []
    for shape, time_s in medians.items():
        base = medians[PassShape(1, 1, shape.context)]
        title = f"{shape.num_rows} rows of {shape.num_tokens} tokens"
        rows.append([title, str(shape.context), f"{time_s * 1e3:.2f}", f"{time_s / base:.2f}"])
    table("whole passes, greedy, median", ["pass", "context", "ms", "x one token"], rows)
    one, plain = medians[PASS_SHAPES[0]], median(products[1])
    say(f"one token: {one * 1e3:.2f} ms, {one / plain:.2f} x its matrix products ({plain * 1e3:.2f} ms)")
    many, kv_s = median(products[64]), 64 * 256 * kv.bytes_per_token / limits.bytes_per_s
    all_rows = medians[PassShape(64, 1, 256)]
    say(
        f"64 rows: {all_rows * 1e3:.1f} ms, {all_rows / (many + kv_s):.2f} x "
        f"matrix products ({many * 1e3:.1f} ms) and KV bytes at full bandwidth ({kv_s * 1e3:.1f} ms)"
    )


# Limits of the machine and matrix products -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Peak rates of all threads together."""

    bytes_per_s: float  # reading memory
    products_per_s: float  # byte products from registers


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Time of one matrix shape times some tokens."""

    num_tokens: int
    time_s: float  # of one product
    floor_s: float

    @property
    def ratio(self) -> float:
        """Time over its floor."""
        return self.time_s / self.floor_s


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the matrix shapes of one layer and the head by name, each shape once."""
    named = {name: shape for name, shape in layer_shapes(config, 0).items() if len(shape) == 2}
    named["head"] = (config.vocab_size, config.hidden_size)
    first = {shape: name for name, shape in reversed(named.items())}
    return {name: (shape[0], shape[1]) for shape, name in reversed(first.items())}


def measure_products(
    team: kernels.ThreadPool, limits: MachineLimits, shape: tuple[int, int], weights: str, tokens: Sequence[int]
) -> Iterator[ProductTime]:
    """Multiply cold copies of a matrix by each number of tokens. Yield medians of rounds."""
    random = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    first = kernels.pack(random, weights)
    copies = min(MAX_COPIES, -(-COLD_BYTES // first.num_bytes))
    matrices = [first, *(kernels.pack(random, weights) for _ in range(copies - 1))]
    for num_tokens in tokens:
        times = kernels.time_products(team, matrices, num_tokens, 7 if num_tokens <= 16 else 3)
        reading_s = first.num_bytes / limits.bytes_per_s
        multiplying_s = BYTE_PRODUCTS.get(weights, 0) * shape[0] * shape[1] * num_tokens / limits.products_per_s
        yield ProductTime(num_tokens, median(times) / copies, max(reading_s, multiplying_s))


def all_matrices(config: ModelConfig, weights: str) -> list[kernels.Matrix]:
    """Return random matrices with the shapes of a whole pass: every layer and the head."""
    shapes = [s for i in range(config.num_layers) for s in layer_shapes(config, i).values() if len(s) == 2]
    random = np.random.default_rng(0)
    return [
        kernels.pack(random.standard_normal(shape, dtype=np.float32), weights)
        for shape in (*shapes, (config.vocab_size, config.hidden_size))
    ]


# Whole passes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassShape:
    """A pass of `num_rows` rows with `num_tokens` tokens each, after `context` tokens."""

    num_rows: int
    num_tokens: int
    context: int

    def packed(self, vocab_size: int) -> Packed:
        """Return the pass with random tokens; each row has its own pages."""
        pages_per_row = -(-(self.context + self.num_tokens) // PAGE_TOKENS)
        pages = np.arange(self.num_rows * pages_per_row).reshape(self.num_rows, pages_per_row)
        positions = np.arange(self.context, self.context + self.num_tokens)
        total = self.num_rows * self.num_tokens
        return Packed(
            token_ids=np.random.default_rng(0).integers(0, vocab_size, total),
            positions=np.tile(positions, self.num_rows),
            slots=(pages[:, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS).reshape(-1),
            cu_len=np.arange(0, total + 1, self.num_tokens),
            pages=pages,
            wanted=np.arange(total),
        )


PASS_SHAPES = (
    *(PassShape(1, n, 256) for n in (1, 2, 4, 8, 16, 32, 64)),
    *(PassShape(1, n, 2048) for n in (1, 8)),
    *(PassShape(n, 1, 256) for n in (16, 64)),
)


def time_passes(
    decoder: NativeDecoder, kv: KV, shapes: Sequence[PassShape], repeats: int
) -> dict[PassShape, float]:
    """Return the median time of each greedy pass. Passes are interleaved, as machines drift."""
    greedy = SamplingSpec("argmax", SamplingParams(temperature=0.0))
    passes = {shape: shape.packed(decoder.config.vocab_size) for shape in shapes}
    times: dict[PassShape, list[float]] = {shape: [] for shape in shapes}
    for _ in range(repeats):
        for shape, packed in passes.items():
            start = perf_counter()
            decoder.launch(PassRequest(packed, kv, [greedy] * len(packed.wanted))).wait()
            times[shape].append(perf_counter() - start)
    return {shape: median(measured) for shape, measured in times.items()}
