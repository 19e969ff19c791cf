"""Command line flags of an engine, shared by every command that starts one."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from typing import TYPE_CHECKING

from paceline.backend.registry import BACKENDS
from paceline.engine.assembly.config import DEFAULT_DRAFT, OVERLAPS, EngineConfig
from paceline.engine.assembly.speculative_config import options_of
from paceline.engine.scheduler import Limits

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

DEFAULTS = EngineConfig()


def add_engine_arguments(parser: ArgumentParser) -> None:
    """Add the flags of an engine with one drafter."""
    parser.add_argument(
        "--draft",
        metavar="SPEC",
        help="auto[:SPEC+SPEC], where a controller chooses for every row and step; off; or NAME[:key=value,...] "
        f"such as ngram:k=4 or eagle3:model=FOLDER,k=4 (default: {DEFAULT_DRAFT})",
    )
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="as vLLM has it, in place of --draft; what comes of each key is printed",
    )
    parser.add_argument(
        "--overlap",
        metavar="|".join(OVERLAPS),
        default=DEFAULTS.overlap,
        help="draft for one half of the rows while the other is scored; auto: where measured costs say it pays",
    )
    parser.add_argument("--profile", metavar="FILE", help="with auto, what steps cost (default: measured here)")
    parser.add_argument(
        "--objective",
        metavar="throughput|latency:MS",
        default=DEFAULTS.objective,
        help="with auto, the most tokens per second, or so many milliseconds per output token in every answer",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="with auto, write every choice there: `paceline explain FILE`"
    )
    add_target_arguments(parser)


def add_target_arguments(parser: ArgumentParser) -> None:
    """Add the flags of an engine without its drafter."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model",
        metavar="default|PATH|ID",
        default=DEFAULTS.model,
        help="the default model, a folder, a .gguf file or a Hugging Face id",
    )
    group.add_argument("--law", default=DEFAULTS.law, help="coupled (same seed, same text), rejection or block")
    group.add_argument("--backend", default=DEFAULTS.backend, help=f"one of {', '.join(BACKENDS)}")
    types = "; ".join(f"{spec.name}: {', '.join(spec.weight_types)}" for spec in BACKENDS.values())
    group.add_argument("--weights", metavar="TYPE", help=f"{types} (the first is the default)")
    types = "; ".join(f"{n}: {', '.join(s.kv_types) or 'as --weights'}" for n, s in BACKENDS.items())
    group.add_argument("--kv", metavar="TYPE", help=f"type of the KV cache, {types}")
    group.add_argument(
        "--draft-device",
        metavar="same|cpu:CORES|DEVICE",
        default=DEFAULTS.draft_device,
        help="where drafters run: cores of their own such as cpu:2-3, or, on a backend of PyTorch's, a device",
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads of the target (default: all cores)")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--kv-tokens", type=int, metavar="N", help="KV slots in all (default: what the rows need)")
    limits.add_argument(
        "--prefix-cache",
        action=BooleanOptionalAction,
        default=DEFAULTS.prefix_cache,
        help="reuse KV of equal prompts",
    )
    for flag, default, about in (
        ("--max-rows", DEFAULTS.limits.num_rows, "requests that run at once"),
        ("--max-len", DEFAULTS.limits.max_len, "tokens of prompt and answer of one request"),
        ("--prefill-tokens", DEFAULTS.limits.prefill_tokens, "prompt tokens computed in one step, over all rows"),
        ("--max-queued-tokens", DEFAULTS.limits.max_queued_tokens, "prompt tokens that may wait for a row"),
    ):
        limits.add_argument(flag, type=int, metavar="N", default=default, help=about)


def engine_config(args: Namespace) -> EngineConfig:
    """Return the config of parsed flags. Raises `ConfigError`."""
    draft, profile = getattr(args, "draft", None), getattr(args, "profile", None)
    if given := getattr(args, "speculative_config", None):
        draft, profile = options_of(given, draft, profile)
    return EngineConfig(
        model=args.model,
        draft=DEFAULT_DRAFT if draft is None else draft,
        law=args.law,
        backend=args.backend,
        weights=args.weights,
        kv=args.kv,
        threads=args.threads,
        kv_tokens=args.kv_tokens,
        prefix_cache=args.prefix_cache,
        profile=profile,
        overlap=getattr(args, "overlap", DEFAULTS.overlap),
        draft_device=args.draft_device,
        objective=getattr(args, "objective", DEFAULTS.objective),
        trace=getattr(args, "trace", None),
        limits=Limits(
            num_rows=args.max_rows,
            max_len=args.max_len,
            prefill_tokens=args.prefill_tokens,
            max_queued_tokens=args.max_queued_tokens,
        ),
    )
