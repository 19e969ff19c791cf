"""`paceline train eagle3`: train an EAGLE-3 head on its own drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.train.head_recipe import HeadShape
from paceline.train.train_options import (
    add_depths,
    add_training,
    chosen_taps,
    gather,
    open_target,
    train_head,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_training(parser)
    add_depths(parser, num_steps=4)


def run(args: Namespace) -> int:
    """Train a head of one layer."""
    target = open_target(args)
    taps = chosen_taps(args, target)
    shape = HeadShape(
        algorithm="eagle3",
        architecture="Eagle3DraftModel",
        num_layers=1,
        num_steps=args.k,
        taps=taps,
        own_tokens=args.own_tokens > 0,
    )
    return train_head(args, gather(args, target, taps), shape)
