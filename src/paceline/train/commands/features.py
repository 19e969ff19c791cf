"""`paceline train features`: let the target read the data ahead of training, as far as there is any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.train.commands.options import (
    add_data,
    add_reading,
    chosen_taps,
    features_of,
    open_target,
)
from paceline.train.corpus import read_corpus

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_data(parser)
    add_reading(parser)


def run(args: Namespace) -> int:
    """Compute what is missing. Data that grows later only adds to it, so this may run beside `train data`."""
    target = open_target(args)
    corpus = read_corpus(args.data, target.config.vocab_size, args.max_len)
    features_of(args, target, chosen_taps(args, target), corpus.texts)
    return 0
