"""`paceline train features`: compute the target's hidden states of the data ahead of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.train.corpus import read_corpus
from paceline.train.train_options import add_data, add_reading, chosen_taps, features_of, open_target

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_data(parser)
    add_reading(parser)


def run(args: Namespace) -> int:
    """Compute the missing features. May run beside `train data`, which only adds texts."""
    target = open_target(args)
    corpus = read_corpus(args.data, target.config.vocab_size, args.max_len)
    features_of(args, target, chosen_taps(args, target), corpus.texts)
    return 0
