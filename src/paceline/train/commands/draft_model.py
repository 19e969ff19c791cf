"""`paceline train draft-model`: a small model cut from the target's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.model.heads.config import EAGLE3
from paceline.train.commands.options import add_training, gather, open_target, started, train_config
from paceline.train.commands.report import report
from paceline.train.run import run as train
from paceline.train.small import SmallRecipe, choose_layers

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_training(parser)
    parser.add_argument("--layers", default="4", metavar="N|I,J,...", help="of the target: how many, or which")
    parser.add_argument("--k", type=int, default=4, metavar="K", help="drafts to evaluate")


def run(args: Namespace) -> int:
    """Train a copy of some of the target's layers."""
    target = open_target(args)
    layers = choose_layers(args.layers, target.config.num_layers)
    # It looks at none of the taps; with those of the heads it shares their hidden states on disk.
    material = gather(args, target, EAGLE3.default_taps(target.config.num_layers))
    config = train_config(args, material, eval_steps=args.k)
    recipe = SmallRecipe(layers, target, material.vocabulary)
    choices = {"layers": layers} | started(args, recipe)
    report(args.out, material, train(recipe, config, material, choices, args.out, args.type))
    return 0
