"""`paceline train features`, `eagle3` and `peagle`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.model.heads.config import EAGLE3, PEAGLE
from paceline.train.corpus import read_corpus
from paceline.train.head_recipe import HeadShape
from paceline.train.train_options import (
    add_data,
    add_depths,
    add_reading,
    add_training,
    check_start,
    chosen_taps,
    features_of,
    gather,
    mask_token,
    open_target,
    train_head,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


class TrainFeatures:
    """`paceline train features`: compute the target's hidden states of the data ahead of training."""

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Add the command's options."""
        add_data(parser)
        add_reading(parser)

    @staticmethod
    def run(args: Namespace) -> int:
        """Compute the missing features. May run beside `train data`, which only adds texts."""
        target = open_target(args)
        corpus = read_corpus(args.data, target.config.vocab_size, args.max_len)
        features_of(args, target, chosen_taps(args, target), corpus.texts)
        return 0


class TrainEagle3:
    """`paceline train eagle3`: train an EAGLE-3 head on its own drafts."""

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Add the command's options."""
        add_training(parser)
        add_depths(parser, num_steps=4)

    @staticmethod
    def run(args: Namespace) -> int:
        """Train a head of one layer."""
        target = open_target(args)
        check_start(args, target, EAGLE3, PEAGLE)
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


class TrainPEagle:
    """`paceline train peagle`: train a P-EAGLE head, which drafts all positions in one pass."""

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Add the command's options."""
        add_training(parser)
        add_depths(parser, num_steps=8)
        parser.add_argument("--layers", type=int, default=2, metavar="N", help="of the head")

    @staticmethod
    def run(args: Namespace) -> int:
        """Train a head of `--layers` layers."""
        if args.layers < 1:
            raise ConfigError(f"--layers must be at least 1, not {args.layers}")
        target = open_target(args)
        check_start(args, target, EAGLE3, PEAGLE)
        taps = chosen_taps(args, target)
        material = gather(args, target, taps)
        shape = HeadShape(
            algorithm="peagle",
            architecture="PEagleDraftModel",
            num_layers=args.layers,
            num_steps=args.k,
            taps=taps,
            mask_token_id=mask_token(args, material),
            own_tokens=args.own_tokens > 0,
        )
        return train_head(args, material, shape)
