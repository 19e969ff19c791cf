"""`paceline bench kernels`: the native kernels against the machine's own limits."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.core.errors import ConfigError
from paceline.engine.assembly.config import MAX_THREADS

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from paceline import kernels
    from paceline.bench.kernels import MachineLimits, Product
    from paceline.model.config import ModelConfig

TOKENS = (1, 2, 4, 8, 16, 32, 64)
WEIGHTS = ("int8", "int4", "bf16", "f32")
KV = ("i16", "i8", "f16", "f32")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", default="default", metavar="default|PATH|ID", help="whose shapes are measured")
    parser.add_argument("--weights", default="int8", metavar="TYPE", help=f"one of {', '.join(WEIGHTS)}")
    parser.add_argument("--kv", default="i16", metavar="TYPE", help=f"one of {', '.join(KV)}")
    parser.add_argument("--threads", type=int, metavar="N", help="threads (default: all cores)")
    parser.add_argument("--repeat", type=int, default=15, metavar="R", help="rounds of whole passes")


def run(args: Namespace) -> int:
    """Measure and print three tables."""
    from paceline import kernels
    from paceline.backend.seam import num_cores
    from paceline.bench.kernels import measure_limits
    from paceline.model.weights import load_model

    if args.weights not in WEIGHTS or args.kv not in KV:
        raise ConfigError(f"--weights is one of {', '.join(WEIGHTS)}, --kv one of {', '.join(KV)}")
    threads = num_cores() if args.threads is None else args.threads
    if not 1 <= threads <= MAX_THREADS or not 1 <= args.repeat <= 10_000:
        raise ConfigError(f"--threads must be between 1 and {MAX_THREADS}, --repeat between 1 and 10000")
    model, team = load_model(args.model), kernels.Team(threads)
    limits = measure_limits(team)
    Console().print(
        f"{kernels.isa()}, {threads} threads: reads {limits.bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies {limits.products_per_s / 1e9:.0f} billion bytes/s"
    )
    Console().print(_products_table(_products(team, limits, model.config, args.weights), args.weights))
    _print_passes(args, team, limits)
    return 0


def _products(team: kernels.Team, limits: MachineLimits, config: ModelConfig, weights: str) -> list[Product]:
    from paceline.bench.kernels import measure_products, shapes_of

    shapes = shapes_of(config).items()
    return [
        product
        for name, shape in track(list(shapes), "matrices", console=Console(stderr=True))
        for product in measure_products(team, limits, name, shape, weights, TOKENS)
    ]


def _products_table(products: list[Product], weights: str) -> Table:
    table = Table(
        "matrix", "shape", *(f"{n} tok" for n in TOKENS), title=f"{weights}: µs of a product, and x floor"
    )
    for name in dict.fromkeys(p.name for p in products):
        row = [p for p in products if p.name == name]
        cells = [f"{p.time_s * 1e6:.0f}\n{p.ratio:.2f}x" for p in row]
        table.add_row(name, "{} x {}".format(*row[0].shape), *cells)
    return table


def _print_passes(args: Namespace, team: kernels.Team, limits: MachineLimits) -> None:
    from paceline import kernels
    from paceline.backend.native.load import pack_decoder
    from paceline.bench.kernels import CASES, Case, all_matrices, num_pages, time_passes
    from paceline.model.weights import load_model

    model = load_model(args.model)
    decoder = pack_decoder(model.config, model.weights, team, args.weights, args.kv)
    kv = decoder.new_kv(num_pages())
    matrices = all_matrices(model.config, args.weights)
    times: dict[Case, list[float]] = {case: [] for case in CASES}
    products: dict[int, list[float]] = {1: [], 64: []}
    for _ in track(range(args.repeat), "passes", console=Console(stderr=True)):
        for case, time_s in time_passes(decoder, kv, CASES, 1).items():
            times[case].append(time_s)
        for num_tokens, measured in products.items():
            measured.extend(kernels.time_products(team, matrices, num_tokens, 1))
    one = median(times[CASES[0]])
    table = Table("pass", "context", "ms", "x one token", title="whole passes, greedy, median")
    for case in CASES:
        what = f"{case.num_rows} rows of {case.num_tokens} tokens"
        base = median(times[Case(1, 1, case.context)])
        table.add_row(
            what, str(case.context), f"{median(times[case]) * 1e3:.2f}", f"{median(times[case]) / base:.2f}"
        )
    Console().print(table)
    plain, many = median(products[1]), median(products[64])
    kv_s = 64 * 256 * kv.bytes_per_token / limits.bytes_per_s
    Console().print(
        f"one token: {one * 1e3:.2f} ms, {one / plain:.2f} x its matrix products ({plain * 1e3:.2f} ms)"
    )
    rows = median(times[Case(64, 1, 256)])
    Console().print(
        f"64 rows: {rows * 1e3:.1f} ms, {rows / (many + kv_s):.2f} x matrix products ({many * 1e3:.1f} ms) "
        f"and KV bytes at full bandwidth ({kv_s * 1e3:.1f} ms)"
    )
