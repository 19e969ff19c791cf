"""`paceline train eagle3`: an EAGLE-3 head, trained on its own guesses."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline.train.commands.options import (
    add_depths,
    add_training,
    chosen_taps,
    gather,
    open_target,
    train_config,
)
from paceline.train.commands.report import report
from paceline.train.head import HeadRecipe, HeadShape
from paceline.train.run import run as train

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_training(parser)
    add_depths(parser, num_steps=4)


def run(args: Namespace) -> int:
    """Train a head of one layer."""
    target = open_target(args)
    shape = HeadShape(
        algorithm="eagle3",
        architecture="Eagle3DraftModel",
        num_layers=1,
        num_steps=args.k,
        taps=chosen_taps(args, target),
    )
    material = gather(args, target, shape.taps)
    config = train_config(args, material, keep=args.keep, decay=args.decay, eval_steps=args.k)
    recipe = HeadRecipe(shape, target, material.vocabulary, args.seed)
    report(args.out, material, train(recipe, config, material, asdict(shape), args.out))
    return 0
