"""What the commands that train heads have in common."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline.train.commands.options import started, train_config
from paceline.train.commands.report import report
from paceline.train.head import HeadRecipe, HeadShape
from paceline.train.run import run

if TYPE_CHECKING:
    from argparse import Namespace

    from paceline.train.run import Material


def train_head(args: Namespace, material: Material, shape: HeadShape) -> int:
    """Train a head and tell how it went."""
    config = train_config(args, material, keep=args.keep, decay=args.decay, eval_steps=args.k)
    recipe = HeadRecipe(shape, material.target, material.vocabulary, args.seed)
    choices = asdict(shape) | started(args, recipe)
    report(args.out, material, run(recipe, config, material, choices, args.out, args.type))
    return 0
