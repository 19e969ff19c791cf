"""Options shared by the `paceline train` commands, and what is built from them."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import ConfigError, DrafterMismatch
from paceline.core.flags import add_flags, listed, of_flags
from paceline.model.heads.checkpoint import head_config
from paceline.model.heads.config import BLOCK_HEAD, EAGLE3
from paceline.model.heads.cut_model import shares_tables
from paceline.model.heads.values import MAX_TAPS
from paceline.train.compute import AUTO, COMPUTES, choose_compute
from paceline.train.corpus import choose_vocabulary, packs, rarest_token, read_corpus, split, vocabulary_of
from paceline.train.feature_store import DEVICE_PASS_TOKENS, PASS_TOKENS, FeatureFiles
from paceline.train.head_recipe import HeadRecipe, rope_json
from paceline.train.progress import progress
from paceline.train.recipe import KINDS
from paceline.train.run import TrainMaterial, train
from paceline.train.run_folder import make_folder
from paceline.train.summary import print_summary
from paceline.train.target_model import load_target, native_reader, reference_reader
from paceline.train.trainer import TrainConfig

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from paceline.model.heads.config import Algorithm
    from paceline.train.corpus import TrainText
    from paceline.train.head_recipe import HeadShape
    from paceline.train.recipe import Recipe
    from paceline.train.target_model import TargetReader, TrainTarget

MAX_SEED = (1 << 31) - 1  # seed << 32 plus the number of a step fits in 64 bits
DEFAULTS = TrainConfig(steps=1)
VOCABULARY = 8192  # tokens: they cover nine tenths of what the target writes, at a quarter of a draft's time


def add_data(parser: ArgumentParser) -> None:
    """Add the options of commands that read the data."""
    parser.add_argument(
        "--data", required=True, metavar="DIR", type=Path, help="answers, as `paceline train data` wrote them"
    )
    parser.add_argument("--model", default="default", metavar="default|PATH|ID", help="the target")
    parser.add_argument(
        "--features",
        metavar="DIR",
        type=Path,
        help="where hidden states are kept (default: DIR of --data/features)",
    )
    parser.add_argument(
        "--weights",
        default="int8",
        choices=("int8", "int4", "bf16", "f32"),
        help="of the target while it reads the texts, best as it will be served; f32 with --device cuda",
    )
    parser.add_argument("--max-len", type=int, default=1024, metavar="N", help="tokens of a text; the rest is cut")
    parser.add_argument("--threads", type=int, metavar="N", help="of the processor (default: all cores)")
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda", help="where to compute")


def add_training(parser: ArgumentParser) -> None:
    """Add the options of a training run."""
    add_data(parser)
    parser.add_argument(
        "--out", required=True, metavar="DIR", type=Path, help="the drafter's folder; a run resumes there"
    )
    parser.add_argument(
        "--start-from",
        type=Path,
        metavar="FOLDER",
        help="a trained drafter for this target: EAGLE-3 and P-EAGLE from either, a block head from a block head "
        "or a draft model of as many layers, a draft model from a draft model",
    )
    parser.add_argument("--epochs", type=float, default=3.0, metavar="E", help="passes over the data")
    parser.add_argument("--steps", type=int, metavar="N", help="steps, in place of --epochs")
    flags = {
        "batch_tokens": "N tokens of a step",
        "lr": "LR the highest learning rate",
        "start_lr": "SHARE of --lr: the learning rate of what --start-from brings",
        "keep_start": "SHARE of what --start-from brings, in the weights that are written at the end: such means "
        "often draft better than either",
        "eval_tokens": "N held-out tokens evaluated",
        "eval_every": "N steps",
        "save_every": "N steps",
        "seed": "S of first weights, order and dropping",
    }
    add_flags(parser, DEFAULTS, flags)
    _add_vocabulary(parser)
    parser.add_argument("--held-out", type=float, default=0.03, metavar="SHARE", help="of the prompts")
    parser.add_argument(
        "--compute",
        default=AUTO,
        choices=(AUTO, *COMPUTES),
        help="numbers that matrices are multiplied in; auto: bfloat16 where the machine is fast at it",
    )
    parser.add_argument("--type", default="fp16", choices=KINDS, help="of the numbers in the drafter's files")


def _add_vocabulary(parser: ArgumentParser) -> None:
    """Add the options that say which tokens a drafter can write."""
    parser.add_argument(
        "--vocab",
        type=int,
        metavar="N",
        help=f"tokens the drafter can write (default: those of --start-from, or {VOCABULARY})",
    )
    parser.add_argument(
        "--vocab-from",
        type=Path,
        metavar="FOLDER",
        help="a trained drafter whose tokens to take, in place of --vocab",
    )
    parser.add_argument(
        "--own-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of the prompts that a step adds to those: drafts may be any token of a request's text",
    )


def add_reading(parser: ArgumentParser) -> None:
    """Add the options of drafters that read hidden states."""
    parser.add_argument(
        "--taps",
        metavar="I,J,...",
        help="after which of the target's layers to look (default: 2, half, last but 3)",
    )


def add_depths(parser: ArgumentParser, num_steps: int) -> None:
    """Add the options of drafters that learn several depths."""
    parser.add_argument("--k", type=int, default=num_steps, metavar="K", help="drafts to train for")
    flags = {
        "keep": "SHARE of the drafts that go on to the next depth",
        "decay": "X weight of a depth against the one before",
    }
    add_flags(parser, DEFAULTS, flags)
    add_reading(parser)


def open_target(args: Namespace) -> TrainTarget:
    """Check the options, set the threads, open the target. Raises `ConfigError`, `ModelError`."""
    _check(args)
    if getattr(args, "out", None) is not None:
        make_folder(args.out)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return load_target(args.model, torch.device(args.device))


def chosen_taps(args: Namespace, target: TrainTarget) -> tuple[int, ...]:
    """Return the taps of `--taps`; one default serves all heads, so they share feature files."""
    if args.taps is None:
        return EAGLE3.default_taps(target.config.num_layers)
    taps = listed(args.taps, int)
    if not taps:
        raise ConfigError(f"--taps must be layers such as 2,15,27, not {args.taps!r}")
    if len(taps) > MAX_TAPS:
        raise ConfigError(f"--taps has {len(taps)} layers; a head reads at most {MAX_TAPS}")
    if not all(0 <= tap <= target.config.num_layers for tap in taps):
        raise ConfigError(f"--taps {args.taps}: the target has layers 0 to {target.config.num_layers}")
    return taps


def check_start(args: Namespace, target: TrainTarget, *kinds: Algorithm) -> None:
    """Raise `DrafterMismatch` if weights of `--start-from` mean something else in the head to train."""
    if args.start_from is None or (BLOCK_HEAD in kinds and shares_tables(args.start_from)):
        return
    head, rope = head_config(args.start_from, target.config), target.config.rope.of_head()
    same_norms = head.block is not None or (head.fc_norm and head.norm_output and head.norm_before_residual)
    same_rope = (head.layers.rope.theta, head.layers.rope.scaling) == (rope.theta, rope.scaling)
    if head.algorithm not in kinds or not same_norms or not same_rope:
        wanted = " or ".join(f"`paceline train {kind.name}`" for kind in kinds)
        raise DrafterMismatch(
            f"--start-from {args.start_from}: this head is of another kind than the one to be trained, or has "
            f"other norms or another RoPE, so its weights would be noise there; take one of {wanted}"
        )


def gather(args: Namespace, target: TrainTarget, taps: tuple[int, ...]) -> TrainMaterial:
    """Read the data; compute the target's hidden states that are missing on disk.

    Raises `UnsupportedModel`, before any work, if the files of a drafter cannot state the target's RoPE.
    """
    rope_json(target.config.rope.of_head())
    corpus = read_corpus(args.data, target.config.vocab_size, args.max_len)
    training, held_out = split(corpus.texts, args.held_out)
    texts, vocab_size = (corpus.texts[n] for n in training), target.config.vocab_size
    known = args.vocab_from or (args.start_from if args.vocab is None else None)
    if known is not None:
        vocabulary, coverage = vocabulary_of(known, texts, vocab_size)
    else:
        vocabulary, coverage = choose_vocabulary(texts, vocab_size, args.vocab or VOCABULARY)
    store = features_of(args, target, taps, corpus.texts)
    return TrainMaterial(target, corpus, training, held_out, store, vocabulary, coverage)


def mask_token(args: Namespace, material: TrainMaterial) -> int:
    """Return the mask token: that of `--start-from`, or else the rarest of the data."""
    config = material.target.config
    start = args.start_from
    known = None if start is None or shares_tables(start) else head_config(start, config).mask_token_id
    return rarest_token(material.corpus.texts, config.vocab_size) if known is None else known


def features_of(
    args: Namespace, target: TrainTarget, taps: tuple[int, ...], texts: Sequence[TrainText]
) -> FeatureFiles:
    """Return the target's features of the texts; compute those that are missing."""
    store = FeatureFiles(target, taps, texts, args.features or args.data / "features", _weight_type(args))
    with progress("hidden states, tokens") as update:
        at_once = PASS_TOKENS if args.device == "cpu" else DEVICE_PASS_TOKENS
        store.compute(lambda: _reader(args, target, taps), lambda done, total: update(done, total, ""), at_once)
    return store


def _weight_type(args: Namespace) -> str:
    """Return the target's weight type while it reads; compiled kernels exist for CPUs only."""
    return str(args.weights) if args.device == "cpu" else "f32"


def _reader(args: Namespace, target: TrainTarget, taps: tuple[int, ...]) -> TargetReader:
    if args.device == "cpu":
        return native_reader(target, taps, _weight_type(args), args.threads)
    return reference_reader(target, taps)


def train_config(args: Namespace, material: TrainMaterial, **changes: float) -> TrainConfig:
    """Return the settings of the run; without --steps, its steps are those of --epochs."""
    lengths = [len(text) for text in material.corpus.texts]
    per_epoch = sum(1 for _ in packs(material.training, lengths, args.batch_tokens))
    compute, why = choose_compute(args.compute, torch.device(args.device))
    sys.stderr.write(f"matrix products in {compute}: {why}\n")
    steps = args.steps or max(1, round(args.epochs * per_epoch))
    return of_flags(TrainConfig, args, **{"steps": steps, "compute": compute} | changes)


def start_from(args: Namespace, recipe: Recipe) -> dict[str, str]:
    """Copy the weights of `--start-from` if given; return its hash for the provenance."""
    return {} if args.start_from is None else {"started_from": recipe.start_from(args.start_from)}


def _check(args: Namespace) -> None:
    counts = ("steps", "batch_tokens", "max_len", "vocab", "threads", "k")
    for flag in (*counts, "eval_tokens", "eval_every", "save_every"):
        value = getattr(args, flag, None)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least 1, not {value}")
    seed = getattr(args, "seed", 0)
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed must be between 0 and {MAX_SEED}, not {seed}")
    keep_start = getattr(args, "keep_start", 0.0)
    if keep_start and (args.start_from is None or not 0.0 < keep_start < 1.0):
        raise ConfigError(f"--keep-start {keep_start} must be between 0 and 1, and goes with --start-from")
    if getattr(args, "own_tokens", 0) < 0:
        raise ConfigError(f"--own-tokens must be at least 0, not {args.own_tokens}")
    shares = dict.fromkeys(("lr", "start_lr", "keep", "anchors", "decay"), 1.0)
    for flag, high in ({"epochs": 1_000_000, "held_out": 0.9} | shares).items():
        value = getattr(args, flag, None)
        if value is not None and not 0.0 < value <= high:
            raise ConfigError(f"--{flag.replace('_', '-')} must be above 0 and at most {high}, not {value}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no GPU here; train with --device cpu")


def train_and_report(
    args: Namespace, material: TrainMaterial, recipe: Recipe, choices: dict[str, Any], config: TrainConfig
) -> int:
    """Train a drafter in the folder of `--out` and print its acceptance."""
    reading = {"weights": _weight_type(args), "max_len": args.max_len}
    choices = choices | reading | start_from(args, recipe)
    train(recipe, config, material, choices, args.out, args.type)
    print_summary(args.out, len(material.vocabulary), material.coverage)
    return 0


def train_head(args: Namespace, material: TrainMaterial, shape: HeadShape) -> int:
    """Train a head and print its acceptance."""
    config = train_config(args, material, eval_steps=args.k)
    recipe = HeadRecipe(shape, material.target, material.vocabulary, args.seed)
    return train_and_report(args, material, recipe, asdict(shape), config)
