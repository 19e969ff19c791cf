"""Command line flags of an engine, shared by every command that starts one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.backend.registry import AUTO, BACKENDS
from paceline.core.flags import add_flags, of_flags
from paceline.core.sampling_defaults import KINDS
from paceline.engine.assembly.config import DEFAULT_DRAFT, LAW_BUDGET, OVERLAPS, EngineConfig
from paceline.engine.assembly.kv_event_options import events_config
from paceline.engine.assembly.speculative_config import options_of
from paceline.engine.request_table import Limits

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from argparse import _ArgumentGroup as ArgumentGroup

DEFAULTS = EngineConfig()
# Fields of `Limits` and their flags. Their defaults are the backend's.
_LIMITS = {
    "num_rows": ("--max-rows", "requests that run at once"),
    "max_len": ("--max-len", "tokens of prompt and answer of one request"),
    "prefill_tokens": ("--prefill-tokens", "prompt tokens computed in one step, over all rows"),
    "max_queued_tokens": ("--max-queued-tokens", "prompt tokens that may wait for a row"),
}


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
    parser.add_argument("--profile", metavar="FILE", help="with auto, what steps cost (default: measured here)")
    flags = {
        "overlap": f"{'|'.join(OVERLAPS)} draft for one half of the rows while the other is scored; auto: where "
        "measured costs say it pays",
        "objective": "throughput|latency:MS with auto, the most tokens per second, or so many milliseconds per "
        "output token in every answer",
        "keep_learnt": "with auto, begin with what it learnt here before, and keep what it learns; texts stay the "
        "same",
    }
    add_flags(parser, DEFAULTS, flags)
    parser.add_argument(
        "--trace", metavar="FILE", help="with auto, write every choice there: `paceline explain FILE`"
    )
    parser.add_argument(
        "--draft-process", action="store_true", help="a process for every drafter, started anew when it fails"
    )
    add_target_arguments(parser)


def add_target_arguments(parser: ArgumentParser) -> None:
    """Add the flags of an engine without its drafter."""
    group = parser.add_argument_group("engine")
    flags = {
        "model": "default|PATH|ID|shape:NAME the default model, a folder, a .gguf file or a Hugging Face id; or "
        "random weights of a shape, such as shape:llama-3.1-8b or shape:num_layers=2,hidden_size=256",
        "law": "LAW coupled (same seed, same text), rejection or block (verification; same distribution), typical "
        "(changes texts)",
        "backend": f"BACKEND one of {', '.join(BACKENDS)}; {AUTO} takes a backend for a GPU where it can run",
        "draft_device": "same|cpu|cpu:CORES|DEVICE where drafters run: cores of their own such as cpu:2-3, or, on "
        "a backend of PyTorch's, a device; cpu: all cores, beside a target on a GPU",
    }
    add_flags(group, DEFAULTS, flags)
    group.add_argument(
        "--law-budget",
        type=float,
        metavar="SHARE",
        help=f"largest share of changed tokens of an answer, under --law typical (default {LAW_BUDGET})",
    )
    for flag, about, values in (
        ("--device", "where the target runs", {n: s.devices for n, s in BACKENDS.items()}),
        ("--numerics", "exact: same bits in every batch", {n: s.numerics for n, s in BACKENDS.items()}),
    ):
        listed = "; ".join(f"{name}: {', '.join(of)}" for name, of in values.items() if of)
        group.add_argument(flag, metavar="NAME", help=f"{about}; {listed} (the first is the default)")
    types = "; ".join(f"{spec.name}: {', '.join(spec.weight_choices)}" for spec in BACKENDS.values())
    group.add_argument("--weights", metavar="TYPE", help=f"{types} (the first is the default)")
    types = "; ".join(f"{n}: {', '.join(s.all_kv_types) or 'as --weights'}" for n, s in BACKENDS.items())
    group.add_argument("--kv", metavar="TYPE", help=f"auto (the default) or a type of the KV cache; {types}")
    for flag, what, most in (
        (
            "--tensor-parallel",
            "the target's layers, on its device and the next ones, or on shares of the cores",
            {name: spec.max_ranks for name, spec in BACKENDS.items()},
        ),
        (
            "--draft-tensor-parallel",
            "the drafters' layers, likewise",
            {name: spec.max_draft_ranks for name, spec in BACKENDS.items()},
        ),
    ):
        ranks = ", ".join(f"{name}: up to {limit}" for name, limit in most.items() if limit > 1)
        group.add_argument(flag, type=int, metavar="N", default=1, help=f"processes that share {what}; {ranks}")
    group.add_argument("--threads", type=int, metavar="N", help="threads of the target (default: one a core)")
    _add_limits(parser.add_argument_group("limits"))


def _add_limits(limits: ArgumentGroup) -> None:
    limits.add_argument("--kv-tokens", type=int, metavar="N", help="KV slots in all (default: as memory allows)")
    flags = {
        "prefix_cache": "reuse KV of equal prompts",
        "packed_cache_bytes": "N disk that packed weights may take, which later starts map; the oldest used "
        "go first; 0: keep none",
        "kv_disk": "FOLDER also keep the prefix cache on disk, written beside the engine and kept over restarts",
        "kv_disk_bytes": "N most bytes of the folder of --kv-disk; pages used longest ago go first "
        "(default: %(default)s)",
    }
    add_flags(limits, DEFAULTS, flags)
    for name, (flag, about) in _LIMITS.items():
        usual = {getattr(Limits(), name): ""} | {
            getattr(of, name): f" on {kind}"
            for spec in BACKENDS.values()
            for kind, of in spec.device_defaults.items()
            if hasattr(of, name)
        }
        default = ", ".join(f"{number}{where}" for number, where in usual.items())
        limits.add_argument(flag, type=int, metavar="N", help=f"{about} (default: {default})")


def add_sampling_defaults(group: ArgumentParser | ArgumentGroup) -> None:
    """Add the flag for commands that answer requests."""
    about = (
        f"{'|'.join(KINDS)} what is left out is as the model's files say, else temperature 0.7 and top_p 0.95; or "
        "neutral: temperature 1, no filter"
    )
    add_flags(group, DEFAULTS, {"sampling_defaults": about})


def engine_config(args: Namespace) -> EngineConfig:
    """Return the config of parsed flags. Raises `ConfigError`."""
    draft, profile = getattr(args, "draft", None), getattr(args, "profile", None)
    if vllm := getattr(args, "speculative_config", None):
        draft, profile = options_of(vllm, draft, profile)
    asked = {name: getattr(args, flag[2:].replace("-", "_")) for name, (flag, _) in _LIMITS.items()}
    given = {name: value for name, value in asked.items() if value is not None}
    config = of_flags(
        EngineConfig,
        args,
        draft=DEFAULT_DRAFT if draft is None else draft,
        kv_events=events_config(events) if (events := getattr(args, "kv_events_config", None)) else None,
        profile=profile,
    )
    return replace(config, limits=replace(config.usual_limits, **given))
