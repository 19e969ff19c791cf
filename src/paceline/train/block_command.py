"""`paceline train block`: train a block head, which drafts a whole block in one pass.

The recipe is that of DFlash (arXiv 2602.06036) with the corrector of DSpark (arXiv 2607.05147). An anchor is a
token of an answer; a block of mask tokens follows it. In the loss each draft weighs less than the one before.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from paceline.core.errors import ConfigError
from paceline.model.heads.block_format import MAX_BLOCK, MAX_RANK
from paceline.model.heads.config import BLOCK_HEAD
from paceline.train.block_recipe import BlockHeadChoices, BlockHeadRecipe
from paceline.train.train_options import (
    add_reading,
    add_training,
    check_start,
    chosen_taps,
    gather,
    mask_token,
    open_target,
    train_and_report,
    train_config,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


CORRECTORS = ("rnn", "gated", "vanilla", "none")
MAX_LAYERS = 5
LEARNING_RATE = 4e-3  # peak, for Muon; AdamW alone wants a quarter of it


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_training(parser)
    parser.set_defaults(lr=LEARNING_RATE)
    parser.add_argument("--k", type=int, default=8, metavar="K", help="drafts of a block")
    parser.add_argument("--layers", type=int, default=3, metavar="N", help=f"of the head, at most {MAX_LAYERS}")
    parser.add_argument(
        "--anchors",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="share of the answers' tokens at which a block begins",
    )
    parser.add_argument(
        "--decay", type=float, default=0.8, metavar="X", help="weight of a draft against the one before"
    )
    parser.add_argument(
        "--corrector", default="rnn", choices=CORRECTORS, help="how a draft is told of those before it"
    )
    parser.add_argument(
        "--dflash",
        action="store_const",
        const=True,
        help="make a DFlash head, without a corrector, for engines that know no DSpark",
    )
    parser.add_argument("--rank", type=int, default=64, metavar="N", help="width of the corrector")
    parser.add_argument(
        "--share-head",
        action="store_true",
        help="leave the output rows out of the files, as they are the target's; other engines ask for them",
    )
    parser.add_argument(
        "--optimizer", default="muon", choices=("muon", "adamw"), help="of the matrices between states"
    )
    add_reading(parser)


def run(args: Namespace) -> int:
    """Train a head of `--layers` layers."""
    for name, value, high in (
        ("k", args.k, MAX_BLOCK - bool(args.dflash)),
        ("layers", args.layers, MAX_LAYERS),
        ("rank", args.rank, MAX_RANK),
    ):
        if not 1 <= value <= high:
            raise ConfigError(f"--{name} must be between 1 and {high}, not {value}")
    if args.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise ConfigError("this PyTorch has no Muon, which is in 2.9 and later; add --optimizer adamw")
    target = open_target(args)
    check_start(args, target, BLOCK_HEAD)
    taps = chosen_taps(args, target)
    if not args.dflash and args.corrector != "none" and args.rank > target.config.hidden_size:
        raise ConfigError(
            f"--rank must be at most {target.config.hidden_size}, the target's width, not {args.rank}"
        )
    material = gather(args, target, taps)
    choices = BlockHeadChoices(
        num_layers=args.layers,
        size=args.k,
        taps=taps,
        mask_token_id=mask_token(args, material),
        corrector="" if args.dflash or args.corrector == "none" else args.corrector,
        rank=args.rank,
        own_tokens=args.own_tokens > 0,
        dflash=args.dflash,
    )
    config = train_config(args, material, keep=1.0, eval_steps=args.k, muon=args.optimizer == "muon")
    recipe = BlockHeadRecipe(choices, material, args.seed, shares_head=args.share_head)
    return train_and_report(args, material, recipe, asdict(choices), config)
